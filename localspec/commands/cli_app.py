"""The application that commands are added to: what happens to a command line before one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Annotated, Any

import typer

from localspec import __version__
from localspec.commands.cli_options import with_shared_options

Run = Callable[[], int]

app = typer.Typer(
    name="localspec",
    help="Faster local LLM answers by lossless speculative decoding.",
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"localspec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


def command(without: Collection[str] = ()) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a function a command; see ``with_shared_options`` for what becomes of its ``**options``.

    Parsing only binds the arguments. The command runs outside of Typer, which would treat Ctrl-C, a closed pipe and
    errors in its own way.
    """

    def register(function: Callable[..., int]) -> Callable[..., int]:
        def bind(**given: Any) -> Run:
            return partial(function, **given)

        bind.__signature__ = with_shared_options(function, without)  # type: ignore[attr-defined]
        app.command(function.__name__.rstrip("_"), help=function.__doc__)(bind)
        return function

    return register
