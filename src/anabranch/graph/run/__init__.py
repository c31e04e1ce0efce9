"""Running graphs: one straight-line program per step, its memory, and other ways to execute it.

Open ``joint.py`` first: it joins a step's graphs; ``codegen.py`` writes the program. ``bound_state.py`` compares,
before each step, the state that programs are bound to. ``inductor.py`` and ``cuda_graphs.py`` pass the program to
PyTorch's compiler and to CUDA.
"""

__all__: list[str] = []
