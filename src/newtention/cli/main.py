"""Entry point: assembles the commands and turns every ending into a message and an exit status.

0  converged, or done
1  a bug in Newtention
2  bad input, or refused
3  a usable result that has not converged (limits, stalled, Ctrl-C), or lacks a proof asked for
130  interrupted before there was a result
"""

from __future__ import annotations

import io
import re
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from newtention.cli.bench import bench
from newtention.cli.certify import certify
from newtention.cli.examples import examples
from newtention.cli.fit import fit
from newtention.cli.predict import predict
from newtention.cli.report import report
from newtention.cli.svm import svm
from newtention.cli.terminal import ReportFailedError, complain, say

BAD_INPUT = 2
BUG = 1
INTERRUPTED = 130

_OPTIONS = (
    (r'method="([a-z-]+)"', r"--method \1"),
    (r"Rotary\(base=\)", "--rope-base"),
    (r"Options\(cache_bytes=(\d+)\)", r"--cache-bytes \1"),
    (r"Options\((freeze|heads|ranks|patience)=\)", r"--\1"),
    (r"^((?:[^:]+: )?)(heads|ranks|tol|scale|epsilon|accuracy) must", r"\1--\2 must"),
    (r"\bkv_heads=(\d+)", r"--kv-heads \1"),
    (r"\bheads=\.", "--layer-heads."),
    (r"\bprefix='", "--layer-prefix '"),
    (r"\bn_init up to", "--n-init up to"),
    (r"\b(precise|unfolding)=True", r"--\1"),
    (r"\bunfolding=False", "--no-unfolding"),
)
"""How messages of the library name what here are options."""

# typer has carried its own copy of click since 0.26; this is the base class in either case.
_UsageError = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="newtention",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("fit", no_args_is_help=True)(fit)
app.command("predict", no_args_is_help=True)(predict)
app.command("certify", no_args_is_help=True)(certify)
app.command("svm", no_args_is_help=True)(svm)
app.command("report", no_args_is_help=True)(report)
app.add_typer(bench, name="bench")
app.command("examples")(examples)


def _show_version(value: bool) -> bool:
    if value:
        from newtention import __version__

        say(f"newtention {__version__}")
        raise typer.Exit
    return value


@app.callback(
    epilog="Exit status: 0 converged or done; 3 a usable result that has not converged, or lacks a "
    "proof asked for; 2 bad input or a refusal; 1 a bug in Newtention."
)
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Fit attention layers by second-order optimisation, to machine precision.

    Start with [bold]newtention examples[/bold], or with
    [bold]newtention fit example:minilm-head --out result --ridge 0.1[/bold].
    """


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit status; never raises."""
    command = typer.main.get_command(app)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for noise in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", noise)
        warnings.showwarning = lambda message, *_, **__: complain(f"Warning: {message}")
        try:
            status = command.main(list(arguments), prog_name="newtention", standalone_mode=False)
        except _UsageError as error:
            return _usage(error)
        except ReportFailedError as error:
            return _bug(error)
        except (ValueError, TypeError, MemoryError, OSError) as error:
            complain(f"Error: {_sentence(error)}")
            return BAD_INPUT
        except (KeyboardInterrupt, typer.Abort):
            status = INTERRUPTED
        except Exception as error:
            return _bug(error)
    if status == INTERRUPTED:
        complain("Interrupted.")
    return status if isinstance(status, int) else 0


def main() -> None:
    """Console entry point."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Job schedulers announce a kill by SIGTERM: treated like Ctrl-C, the best point is kept.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))


def _usage(error: Any) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":  # older versions of typer raise it
        say(error.format_message())
        return BAD_INPUT
    found = _found(error)
    if found is not None:
        error.message = found
    message = error.format_message().rstrip()
    path = context.command_path if context is not None else "newtention"
    complain(f"Error: {message}{'' if message.endswith('.') else '.'}  See: {path} --help")
    return BAD_INPUT


def _found(error: Any) -> str | None:
    """What an option must be and was, where typer had pydantic check it; None elsewhere."""
    details = getattr(error.__cause__, "errors", None)
    if details is None:
        return None
    first = details(include_url=False)[0]
    kind, about, value = first["type"], first.get("ctx", {}), first["input"]
    if kind == "value_error":  # typer's own words, on choices
        return str(about["error"])
    wants = {"greater_than_equal": "at least {ge:g}", "less_than_equal": "at most {le:g}"}
    if kind in wants:
        return f"must be {wants[kind].format(**about)}; found {value}."
    number = "an integer" if kind.startswith("int_") else "a number"
    return f"must be {number}; found {value!r}."


def _sentence(error: BaseException) -> str:
    """The message; the operating system's errors put into words."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}."
    text = str(error) or type(error).__name__
    for pattern, option in _OPTIONS:
        text = re.sub(pattern, option, text)
    return text


def _bug(error: BaseException) -> int:
    complain(
        "This is a bug in Newtention.  Please report it with the command you gave and these lines:"
    )
    complain("".join(traceback.format_exception(error)).rstrip())
    return BUG
