"""``python -m hpo``: the same as the ``hpo`` command."""

from hpo.cli.app import main

if __name__ == "__main__":
    main()
