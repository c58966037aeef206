"""One study: created and loaded, read (status, ranking, pruning), and cared for (retry, repair, retention).

Imports from search and below. Used from above: `open_study` (`start_study`, `load_study`, `OpenStudy`),
`status`, `outcome`, `ranking`, `folders` and the modules named after what they do.
"""
