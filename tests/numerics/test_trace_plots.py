"""Plots of a trace: dtypes over time, and bytes of casts by module."""

from __future__ import annotations

import builtins
import dataclasses
import io
from typing import Any

import pytest

from helpers.made_up_traces import START, linear, made_up_call, report_of, small_report
from torch_promote.errors import MissingPackageError
from torch_promote.observe.trace_report import plot_casts, plot_dtypes


def test_a_report_plots_both() -> None:
    figure = small_report().plot()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == ["Dtypes of results over time", "Bytes of casts by module"]
    file = io.BytesIO()
    figure.savefig(file)
    assert file.getvalue().startswith(b"\x89PNG")


def test_bars_are_shares_of_the_calls_that_began_then() -> None:
    (axes,) = plot_dtypes(small_report()).axes
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["float32", "bfloat16"]
    float32, bfloat16 = ([bar.get_height() for bar in container] for container in axes.containers)
    assert (len(float32), len(bfloat16)) == (80, 80)
    assert (float32[0], bfloat16[-1]) == (100, 100)  # the norm first, the product of the backward last
    assert {low + high for low, high in zip(float32, bfloat16, strict=True)} == {0, 100}


def test_phases_are_shaded_and_named() -> None:
    calls = [
        made_up_call(start=START + milliseconds * 1_000_000, phase=phase)
        for milliseconds, phase in (
            (0, "forward"),
            (10, "backward"),
            (15, "recompute"),
            (20, "backward"),
            (40, "forward"),
        )
    ]
    (axes,) = plot_dtypes(report_of(*calls)).axes
    assert [text.get_text() for text in axes.texts] == ["forward", "backward", "recompute", "backward"]
    assert [line.get_xdata()[0] for line in axes.lines] == [10, 15, 20, 40]


def test_casts_are_stacked_by_whether_they_were_made_before() -> None:
    (axes,) = plot_casts(small_report()).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "blocks.0.query",
        "blocks.0.key",
        "(outside of modules)",
    ]
    once, again = ([bar.get_width() for bar in container] for container in axes.containers)
    assert (once, again) == ([33_792, 0, 32], [0, 1024, 0])
    assert [text.get_text() for text in axes.texts] == ["33 KiB", "1 KiB", "32 B"]


def test_many_modules_are_cut_and_long_or_odd_names_are_drawn() -> None:
    calls = [linear(f"{'x' * 60}.{number}", number, number) for number in range(30)]
    calls.append(dataclasses.replace(linear("$a$", 99, 99), casts=calls[0].casts * 2))
    figure = plot_casts(report_of(*calls))
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "Bytes of casts by module, the first 16 of 31 modules"
    assert len(axes.get_yticklabels()) == 16
    assert axes.get_yticklabels()[0].get_text() == r"\$a\$"
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize("calls", [[], [made_up_call()]], ids=["no call", "no casts"])
def test_empty_reports_are_drawn_too(calls: list[Any]) -> None:
    figure = report_of(*calls).plot()
    figure.savefig(io.BytesIO())
    assert figure.axes[1].texts[0].get_text() == "no casts were made"


def test_plots_can_be_drawn_into_given_axes() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_dtypes(small_report(), left) is figure
    assert plot_casts(small_report(), right) is figure


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def other(name: str, *args: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", other)
    with pytest.raises(MissingPackageError, match=r"need matplotlib: pip install matplotlib"):
        small_report().plot()
