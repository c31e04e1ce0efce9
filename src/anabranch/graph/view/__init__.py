"""Views of graphs: ``graph_page.py`` writes a page for a browser, ``dot.py`` Graphviz's language."""
