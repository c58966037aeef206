"""For `import hpo`: `functions` run and read studies, `study` and `values` make them of ordinary classes.

Imports from console and below. The public names are those of `hpo.__all__`.
"""
