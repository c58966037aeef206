"""For `import hpo`: studies of ordinary classes, the result of a run, studies to read. `hpo.api` hands them out."""
