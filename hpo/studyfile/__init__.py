"""Reading a study file: YAML or Python objects in, checked sections and errors with line numbers out."""
