"""The command line. Heavy imports happen inside the commands, so that ``--help`` is instant."""

from __future__ import annotations

import itertools
import os
import re
import sys
from typing import Annotated, NoReturn

import typer

from ebbtide.cli import kv, options
from ebbtide.engine.config import DEFAULT_MODEL
from ebbtide.errors import InputError

app = typer.Typer(
    name="ebbtide",
    help="Serve language models with a KV cache that is larger than the device's memory.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(kv.app, name="kv")

Host = Annotated[str, typer.Option(help="Address to listen on; the default is this machine only.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]
Temperature = Annotated[
    float | None, typer.Option(help="0 is greedy; the model's own default if not given.")
]


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"ebbtide {version('ebbtide')}")
        raise typer.Exit


@app.callback()
def _all_commands(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
@options.with_engine_options
def serve(engine: options.EngineOptions, host: Host = "127.0.0.1", port: Port = 8000) -> None:
    """Serve a model over HTTP, as the OpenAI API does."""
    from ebbtide.cli.progress import loading
    from ebbtide.server.run import BindError
    from ebbtide.server.run import serve as run

    with loading() as progress:

        def ready(url: str) -> None:
            progress.done()
            typer.echo(f"Ebbtide serves {engine.config.model} at {url}/v1 (stop with Ctrl-C)")

        try:
            kept = run(
                engine.config, host, port, progress=progress, ready=ready, stopping=typer.echo
            )
        except BindError as error:
            hint = ", 0 for a free one" if error.field == "port" else ""
            raise options.Failure(f"{error}; choose another with --{error.field}{hint}") from None
    if kept:
        typer.echo(kept)


@app.command()
@options.with_engine_options
def chat(
    engine: options.EngineOptions,
    system: Annotated[str | None, typer.Option(help="System message of the conversation.")] = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = None,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
) -> None:
    """Talk to a model. Reads one message from a pipe, or a conversation from the terminal."""
    from ebbtide.cli.chat import run_chat
    from ebbtide.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    run_chat(engine.config, params, system)


@app.command()
@options.with_engine_options
def generate(
    engine: options.EngineOptions,
    input: Annotated[str, typer.Option("--input", "-i", help="JSON lines, or - for a pipe.")],
    output: Annotated[str, typer.Option("--output", "-o", help="Where results go, as JSON lines.")],
    overwrite: Annotated[bool, typer.Option(help="Replace an output that exists.")] = False,
) -> None:
    """Complete many prompts from a file, all together."""
    from ebbtide.cli.batch import run_batch

    failed = run_batch(engine.config, input, output, overwrite)
    if failed:
        raise options.Failure(f"{failed} lines could not be completed: see their error in {output}")


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="A model to show it with.")] = DEFAULT_MODEL,
) -> None:
    """Show what a host tier does for conversations that do not fit the device."""
    from ebbtide.cli.demo import run_demo

    if not run_demo(model):
        raise typer.Exit(1)


def main() -> None:
    """Entry point. Whatever is wrong with the input becomes one sentence and an exit code."""
    try:
        sys.exit(app(sys.argv[1:] or ["--help"], standalone_mode=False))
    except InputError as error:
        _end(options.with_flags(str(error)), 2)
    except options.Failure as error:
        _end(str(error), 1)
    except BrokenPipeError:  # whoever read our output has left; the interpreter is not to mind
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        _end(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # of typer, and of click before it
            raise
        _end(_usage_message(error), 2)


def _usage_message(error: Exception) -> str:
    """What typer says about wrong usage, on one line, with the value where its parser leaves it out."""
    message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
    option = re.search(r"'(--[\w-]+)", message)
    said = _said(option[1]) if option else None
    return message if said is None or said in message else f"{message}; got {said!r}"


def _said(option: str) -> str | None:
    """What the command line says for an option: "--port x" or "--port=x"."""
    for word, following in itertools.pairwise([*sys.argv[1:], ""]):
        name, equals, value = word.partition("=")
        if name == option:
            return value if equals else following or None
    return None


def _end(message: str, code: int) -> NoReturn:
    typer.echo(f"ebbtide: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
