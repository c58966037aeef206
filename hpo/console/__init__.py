"""What a terminal shows: event lines, the live view, tables, JSON; and the snapshot of a study that they draw.

Imports from execution and below. Used by `hpo.cli` and `hpo.api.functions`.
"""
