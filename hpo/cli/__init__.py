"""The command line: a module for each command, which parses its options, calls hpo, and prints the result."""
