"""The Python API: `functions` runs and reads studies, `study` and `values` build them from ordinary classes.

Imports from console and below. `hpo.__all__` has the public names.
"""
