"""Drafts a study file for existing code: `hpo init --from`."""
