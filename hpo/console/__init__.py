"""The output of a running study on a terminal: lines, the live view and JSON events, and the data they show.

Imports from execution and below. `hpo.cli` and `hpo.api.functions` use it.
"""
