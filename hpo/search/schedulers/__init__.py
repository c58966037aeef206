"""What a running trial does next, and what a free worker does next: decided from the storage, so that all agree.

A scheduler may import `hpo.storage`, `hpo.config` and the rest of `hpo.search`.
"""
