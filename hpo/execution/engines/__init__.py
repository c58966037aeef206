"""Where agents run: `engine` is the interface, `by_name` reads the text of `--on`; a module for each engine."""
