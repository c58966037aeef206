"""A study file around code that is there already: `hpo init --from`."""
