"""A whole step as a graph: forward, backward and update captured, bound to the model's tensors, and run.

Open ``program.py`` first; ``joint.py`` joins the graphs of ``backward.py`` and ``update.py`` into one program, and
``bound_state.py`` compares, before each step, the state that programs are bound to.
"""
