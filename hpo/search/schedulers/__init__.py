"""Schedulers decide what a running trial and a free worker do next, from the storage alone, so that workers agree.

A scheduler may import `hpo.storage`, `hpo.config` and the rest of `hpo.search`.
"""
