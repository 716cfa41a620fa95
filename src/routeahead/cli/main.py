"""The entry of the `routeahead` command: imports what takes time where it can be interrupted."""

from __future__ import annotations

import signal


def main() -> None:
    """Runs the command line of this process and exits (`cli.app.run_command`).

    Before and after, when there is nothing to complete, Ctrl-C ends the process at once and without
    a traceback; one that somebody chose to ignore stays ignored.
    """
    handler = signal.getsignal(signal.SIGINT)
    quick = signal.SIG_DFL if handler is signal.default_int_handler else handler
    signal.signal(signal.SIGINT, quick)
    from routeahead.cli.app import run_command

    signal.signal(signal.SIGINT, handler)
    try:
        run_command()
    finally:
        signal.signal(signal.SIGINT, quick)


if __name__ == "__main__":
    main()
