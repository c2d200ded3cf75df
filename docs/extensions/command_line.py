"""`{command-line}`: every command of `newtention` with its options, from the program itself."""

import re
from collections.abc import Iterator
from typing import Any, get_args

import typer
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from newtention.cli.main import app as program

_OPTION = re.compile(r"(?<!\S)(--[a-z][\w-]*)")
_MARKUP = re.compile(r"\[(bold|cyan)\](.*?)\[/\1\]", re.S)


class CommandLine(SphinxDirective):
    """A section for each command: what it does, then its arguments and options by panel."""

    def run(self) -> list[nodes.Node]:
        """Build the sections."""
        root = typer.main.get_command(program)
        text = _paragraphs(root.help or "") + _paragraphs(root.epilog or "")
        return text + [_section(name, command) for name, command in _commands(root, "newtention")]


def _commands(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}", command


def _section(name: str, command: Any) -> nodes.section:
    section = nodes.section(ids=[nodes.make_id(name)], names=[name])
    section += nodes.title(text=name)
    section += _paragraphs(command.help or "")
    panels: dict[str, list[Any]] = {}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            argument = parameter.param_type_name == "argument"
            panel = parameter.rich_help_panel or ("Arguments" if argument else "Options")
            panels.setdefault(panel, []).append(parameter)
    for panel, parameters in panels.items():
        section += nodes.rubric(text=panel)
        listed = nodes.definition_list()
        for parameter in parameters:
            listed += _definition(parameter)
        section += listed
    return section


def _definition(parameter: Any) -> nodes.definition_list_item:
    value = "" if getattr(parameter, "is_flag", False) else _value(parameter)
    names = [*parameter.opts, *parameter.secondary_opts]
    if parameter.param_type_name == "argument":
        names, value = [value], ""
    head = ", ".join(names) + (f" {value}" if value else "")
    text = " ".join((parameter.help or "").split())
    if parameter.required:
        text += " Required."
    elif not isinstance(parameter.default, bool | None) and "Default:" not in text:
        default = parameter.default
        text += f" Default: {default:g}." if isinstance(default, float) else f" Default: {default}."
    return nodes.definition_list_item(
        "",
        nodes.term("", "", nodes.literal(text=head)),
        nodes.definition("", nodes.paragraph("", "", *_words(text))),
    )


def _value(parameter: Any) -> str:
    """What stands for the value: its name, or the words to choose from."""
    if parameter.metavar:
        return parameter.metavar
    kind = parameter.type_descriptor.annotation
    return "|".join(get_args(kind)) if get_args(kind) else kind.__name__.upper()


def _paragraphs(text: str) -> list[nodes.Node]:
    """The help text: bold lines are headings, lines in cyan commands."""
    out: list[nodes.Node] = []
    for block in text.split("\n\n"):
        words = " ".join(block.split())
        whole = _MARKUP.fullmatch(words)
        if whole and whole[1] == "bold":
            out.append(nodes.rubric(text=whole[2]))
        elif whole:
            out.append(nodes.literal_block(text=whole[2], language="none"))
        elif words:
            paragraph = nodes.paragraph()
            for i, part in enumerate(re.split(r"\[/?(?:bold|cyan)\]", words)):
                paragraph += [nodes.literal(text=part)] if i % 2 else _words(part)
            out.append(paragraph)
    return out


def _words(text: str) -> list[nodes.Node]:
    """Plain text, the options in it as code."""
    return [
        nodes.literal(text=part, classes=["option"]) if i % 2 else nodes.Text(part)
        for i, part in enumerate(_OPTION.split(text))
    ]


def setup(app: Any) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("command-line", CommandLine)
    return {"parallel_read_safe": True}
