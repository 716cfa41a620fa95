"""`python -m routeahead` is the command `routeahead`."""

from __future__ import annotations

from routeahead.cli.main import main

if __name__ == "__main__":
    main()
