"""Running graphs: ``codegen.py`` writes a graph as one straight-line program.

``memory.py`` plans its memory, and makes it fit a budget; ``inductor.py`` and ``cuda_graphs.py`` pass
it to PyTorch's compiler and to CUDA.
"""
