"""Where agents run: `engine` is the interface, `by_name` reads the text of `--on`; each engine has a module."""
