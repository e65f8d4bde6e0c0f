"""What the papers say of a schedule, as the package's docstrings have it, with numbers put in.

p: stages; m: micro-batches; v: chunks; F, B, I, W: the times of a forward, a backward and its two
parts, on one virtual stage; d: the latency.  tests/lab/test_answers.py compares each with what
`simulate` computes, wherever its condition holds.
"""

from typing import Any

from lab.formula import put_in, shown

# Output -> schedules -> (formula, where it holds beside equal stages and links without a limit).
# A bubble is w / (m * v * (F + B) + w), where w is what the last papers give: the waiting.
CLOSED = {
    "bubble_rate": {
        "inter_layer": ("1 - 1 / p", "d == 0"),
        "gpipe": ("(p - 1) / (m + p - 1)", "d == 0"),
        "one_f_one_b": ("(p - 1) / (m + p - 1)", "d == 0"),
        "interleaved": ("(p - 1) / (m * v + p - 1)", "d == 0"),
        "zero_bubble_h1": (
            "(p - 1) * max(F + I - W, I) / (m * (F + I + W) + (p - 1) * max(F + I - W, I))",
            "d == 0 and m >= p",
        ),
        "zero_bubble_h2": (
            "(p - 1) * max(F + I - 2 * W, I - F, 0)"
            " / (m * (F + I + W) + (p - 1) * max(F + I - 2 * W, I - F, 0))",
            "d == 0 and m >= 2 * p - 1",
        ),
        "zero_bubble_v": (
            "(p - 1) * (F - W) / (m * (F + I + W) + (p - 1) * (F - W))",
            "d == 0 and m >= 2 * p - 1 and F == I and F >= W",
        ),
    },
    "cost": {
        "inter_layer": ("m * p * (F + B)", "d == 0"),
        "gpipe": ("(m + p - 1) * (F + B)", "d == 0"),
        "one_f_one_b": ("(m + p - 1) * (F + B)", "d == 0"),
        "interleaved": ("(m * v + p - 1) * (F + B)", "d == 0"),
    },
    "peak_activations": {
        "inter_layer": ("1", "p >= 1"),
        "gpipe": ("m", "p >= 1"),
        "one_f_one_b": ("min(p, m)", "p >= 1"),
        "zero_bubble_h1": ("min(p, m)", "p >= 1"),
        "zero_bubble_h2": ("min(2 * p - 1, m)", "p >= 1"),
        "zero_bubble_v": ("p", "m >= 2 * p - 1"),
        "dualpipe_v": ("p + 1 / 2", "m >= 2 * p"),
        "pipedream": ("min(p, m)", "p >= 1"),
    },
    "messages": {
        **dict.fromkeys(
            ("inter_layer", "gpipe", "one_f_one_b", "zero_bubble_h1", "zero_bubble_h2"),
            ("2 * m * (p - 1)", "p >= 1"),
        ),
        "pipedream": ("2 * m * (p - 1)", "p >= 1"),
        "pipedream_2bw": ("2 * m * u * (p - 1)", "p >= 1"),
        "interleaved": ("2 * m * (p * v - 1)", "p > 1"),
        "zero_bubble_v": ("4 * m * (p - 1)", "p >= 1"),
        "dualpipe_v": ("4 * m * (p - 1)", "p >= 1"),
    },
}
TIMED = ("bubble_rate", "cost")


def closed_forms(name: str, values: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return by output the closed form that holds for these values, with its numbers put in."""
    numbers = {
        letter: values.get(parameter)
        for letter, parameter in (
            ("p", "stages"),
            ("m", "microbatches"),
            ("v", "chunks"),
            ("u", "updates"),
            ("F", "forward"),
            ("B", "backward"),
            ("I", "input_grad"),
            ("W", "weight_grad"),
            ("d", "latency"),
        )
    }
    equal = not any(isinstance(number, list) for number in numbers.values())
    lasting = equal and numbers["F"] + min(numbers["B"], numbers["I"] + numbers["W"]) > 0
    found = {}
    for output, forms in CLOSED.items():
        if name not in forms:
            continue
        if output in TIMED and not (lasting and values.get("bandwidth") is None):
            continue
        formula, condition = forms[name]
        if put_in(condition, **numbers)[1]:
            text, value = put_in(formula, **numbers)
            found[output] = {"formula": shown(formula), "put_in": text, "value": value}
    return found
