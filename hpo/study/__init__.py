"""Everything about one study: creating and loading it, reading its state, and maintaining its trials and files.

Imports from search and below. Packages above use `open_study` (`start_study`, `load_study`, `OpenStudy`),
`status`, `outcome`, `ranking`, `folders`, and modules such as `retry`, `repair` and `retention`.
"""
