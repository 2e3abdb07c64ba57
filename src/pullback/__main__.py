"""`python -m pullback` is the command `pullback`."""

from ._core.errors import PullbackError, import_extra


def main() -> None:
    """Run the command."""
    try:
        with import_extra("cli"):
            from .cli.app import app
    except PullbackError as error:
        raise SystemExit(str(error)) from None
    app()


if __name__ == "__main__":
    main()
