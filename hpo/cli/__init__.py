"""The command line: parse, call one function, map errors to exit codes."""
