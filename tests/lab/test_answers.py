"""What the live pages are answered, natively: it is what the package says, and nothing else."""

import ast
import json
import math
from pathlib import Path

import lab
import pytest
from lab import activations, closed_forms, collectives, planning, puzzle, zero
from lab.formula import put_in
from lab.schedule import drawn
from lab_settings import drawn_settings, simulated

from naranhi import costs, measure, schedules
from naranhi.schedules.names import OURS

REPOSITORY = Path(__file__).resolve().parents[2]


def ask(kind, **values):
    return json.loads(lab.answer(json.dumps({"lab": kind, "values": values})))


# --- schedules -----------------------------------------------------------------------------------


def test_a_timeline_is_the_packages_to_the_last_digit():
    for values in drawn_settings(100):
        schedule, line = simulated(values)
        answer = ask("schedule", **values)
        [shown] = answer["timelines"]
        assert [[tuple(box[i] for i in (0, 3, 4)) for box in row] for row in shown["rows"]] == [
            [(str(action), start, end) for action, start, end in row] for row in line
        ], values
        outputs = {name: output["value"] for name, output in answer["outputs"].items()}
        assert outputs == {
            "bubble_rate": line.bubble_rate,
            "cost": line.cost,
            "peak_activations": list(line.peak_activations),
            "messages": sum(map(len, schedules.channels(schedule).values())),
        }


def test_the_definition_of_the_bubble_has_the_numbers_that_make_it():
    output = ask("schedule", schedule="gpipe")["outputs"]["bubble_rate"]
    assert output["put_in"] == "1 − 96 / (4 × 33)"
    assert output["computed"] == output["value"] == 1 - 96 / (4 * 33)


# Of F, I and W. In the last two W takes longest.
TIMES = (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 4)


@pytest.mark.parametrize("name", OURS)
def test_closed_forms_hold_where_they_say_so(name):
    said = 0
    for p in range(1, 5):
        for m in (p, 2 * p, 4 * p):
            for forward, input_grad, weight_grad in TIMES:
                values = {
                    "schedule": name,
                    "stages": str(p),
                    "microbatches": str(m),
                    "forward": str(forward),
                    "backward": str(input_grad + weight_grad),
                    "input_grad": str(input_grad),
                    "weight_grad": str(weight_grad),
                }
                if name == "dualpipe_v" and m < 2 * p:
                    continue
                for output in ask("schedule", **values)["outputs"].values():
                    if "closed" in output:
                        most = output["value"]
                        most = max(most) if isinstance(most, list) else most
                        assert math.isclose(output["closed"]["value"], most, abs_tol=1e-12), values
                        said += 1
    assert said > 20


def test_no_closed_form_is_shown_where_it_does_not_hold():
    assert "closed" in ask("schedule")["outputs"]["cost"]
    for other in ({"latency": "1"}, {"bandwidth": "1"}, {"forward": "1 2 1 1"}):
        outputs = ask("schedule", **other)["outputs"]
        assert "closed" not in outputs["cost"] and "closed" not in outputs["bubble_rate"], other
        assert outputs["peak_activations"]["closed"]["value"] == 4


def test_of_two_schedules_each_rank_has_as_much_to_do():
    answer = ask("schedule", schedule="one_f_one_b", compare="interleaved", chunks="2")
    assert answer["share"] == 0.5
    busy = [sum(box[4] - box[3] for box in line["rows"][0]) for line in answer["timelines"]]
    assert busy == [24, 24]
    assert answer["compared"]["bubble_rate"]["value"] == pytest.approx(3 / 19)


def test_a_box_knows_its_chunk_on_its_rank_and_its_half_of_a_pair():
    [line] = ask("schedule", schedule="interleaved", chunks="2")["timelines"]
    chunks = [{int(box[0].split(box[1])[0]): box[5] for box in row} for row in line["rows"]]
    assert chunks == [{rank: 0, rank + 4: 1} for rank in range(4)]

    pairs = schedules.dualpipe_v(2, 4)
    rows = drawn(schedules.simulate(pairs, overlapped=3))["rows"]
    found = [[(box[0], box[6]) for box in row if len(box) == 7] for row in rows]
    asked = [[unit for unit in row if len(unit) == 2] for row in pairs.units]
    assert found == [
        [(str(action), half) for unit in row for half, action in enumerate(unit)] for row in asked
    ]
    assert all(found)


def test_what_is_drawn_can_be_typed_again():
    for name in OURS:
        answer = ask("schedule", schedule=name, stages="2", microbatches="4")
        again = ask("schedule", schedule="own", own=answer["csv"], compare="")
        assert again["timelines"][0]["rows"] == answer["timelines"][0]["rows"], name


WRONG = {
    "deadlock": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F1 2F0 2B0 2B1",
    "own deadlock": "0F0 0B0\n1B0 1F0",
    "incomplete": "0F0 0F1 0B0\n1F0 1F1 1B0 1B1",
    "typing error": "0F0 0X0\n1F0 1B0",
    "two ranks": "0F0 0B0\n0F1 0B1",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("comma", [False, True])
def test_a_wrong_schedule_gets_the_packages_own_error(text, comma, tmp_path):
    text = text.replace(" ", ",") if comma else text
    (tmp_path / "own.csv").write_text(text.replace(" ", ","))
    with pytest.raises(schedules.ScheduleError) as refused:
        schedules.check(schedules.read_csv(tmp_path / "own.csv"))
    said = str(refused.value).removeprefix(f"{tmp_path / 'own.csv'}: ")
    assert ask("schedule", schedule="own", own=text)["error"]["text"] == said


def code(kind, **values):
    return ask(kind, **values)["error"]


def test_what_cannot_be_an_input_has_words_of_the_page():
    assert code("schedule", stages="99") == {
        "code": "out_of_range",
        "values": {"name": "stages", "value": "99", "low": 1, "high": 64},
    }
    assert code("schedule", stages="four")["code"] == "no_number"
    assert code("schedule", stages="")["code"] == "no_number"
    assert code("schedule", stages="2.5")["code"] == "no_whole_number"
    assert code("schedule", forward="-1")["code"] == "out_of_range"
    assert code("schedule", forward="nan")["code"] == "out_of_range"
    assert code("schedule", stages="1e999")["code"] == "no_whole_number"
    assert code("schedule", schedule="zigzag")["code"] == "no_choice"
    assert code("schedule", speed="1")["code"] == "unknown_field"
    assert code("schedule", schedule="own", own=" \n")["code"] == "nothing_typed"
    assert code("planning", model="config.json", config="{")["code"] == "no_config"
    assert code("planning", model="config.json", config="[1]")["code"] == "no_config"
    assert code("planning", model="config.json", config="[" * 100_000)["code"] == "no_config"
    assert "is not supported" in code("planning", model="config.json", config="{}")["text"]


def test_ten_thousand_actions_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(schedules, "get", lambda name: pytest.fail("it was made"))
    refusal = {"code": "too_many_actions", "values": {"actions": 10_000, "most": 6000}}
    assert code("schedule", schedule="gpipe", stages="10", microbatches="500") == refusal
    assert code("schedule", schedule="own", own="0F0 " * 10_000) == refusal


# --- a puzzle ------------------------------------------------------------------------------------


def test_the_puzzle_is_the_chapters():
    """Its budget is in the chapter's cell, and in the fields of the lab."""
    path = REPOSITORY / "notebooks/en/10_interleaved_zero_bubble.ipynb"
    cells = {cell["id"]: cell for cell in json.loads(path.read_text())["cells"]}
    tree = ast.parse("".join(cells["invent-judged"]["source"]))
    [call] = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "schedules.grade"
    ]
    budget = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    fields = {field.name: field.default for field in puzzle.FIELDS}
    assert {name: float(fields[name]) for name in budget} == budget


def test_the_puzzle_is_judged_as_in_the_chapter():
    h1 = schedules.zero_bubble_h1(4, 8)
    verdict = schedules.grade(h1, 4, 8, cost=26, max_activations=5, messages=48)
    answer = ask("puzzle", own=str(h1))
    assert (answer["passes"], answer["faults"]) == (False, list(verdict.faults))
    assert answer["faults"] == ["takes 27, where 26 is the budget"]
    forgotten = ask("puzzle", own=str(h1).replace("2W7", ""))
    assert forgotten["faults"] == ["rank 2 forgets 2W7"]

    def row(stage, ahead=(5, 3, 2, 1), late=(0, 2, 3, 4)):
        names, waiting = [f"{stage}F{k}" for k in range(ahead[stage])], []
        for k in range(8):
            names.append(f"{stage}I{k}")
            waiting.append(f"{stage}W{k}")
            if k >= late[stage]:
                names.append(waiting.pop(0))
            if k + ahead[stage] < 8:
                names.append(f"{stage}F{k + ahead[stage]}")
        return " ".join(names + waiting)

    answer = ask("puzzle", own="\n".join(map(row, range(4))))
    assert (answer["passes"], answer["faults"]) == (True, [])


# --- a trace -------------------------------------------------------------------------------------


def test_a_simulated_trace_is_its_own_simulation(tmp_path):
    line = schedules.simulate(
        schedules.zero_bubble_h1(4, 8), 0.01, input_grad=0.02, weight_grad=0.01
    )
    measure.write_trace(line, tmp_path / "trace.json")
    answer = ask("trace", file=(tmp_path / "trace.json").read_text(), file_name="trace.json")
    assert [action for _, action, *_ in answer["differences"]] == [
        str(span.action) for row in line for span in row
    ]
    assert (
        max(abs(one) for *_, late, longer in answer["differences"] for one in (late, longer)) < 1e-9
    )
    assert answer["outputs"]["cost"]["value"] == pytest.approx(line.cost)


def test_a_measured_trace_differs_by_what_was_late(tmp_path):
    """One forward takes twice as long: it is named, and what follows is late."""
    line = schedules.simulate(schedules.gpipe(2, 3), 0.01, 0.01)
    spans = [list(row) for row in line]
    spans[0][2] = spans[0][2]._replace(end=spans[0][2].end + 0.01)
    spans[1] = [
        span._replace(start=span.start + 0.01 * (place >= 2), end=span.end + 0.01 * (place >= 2))
        for place, span in enumerate(spans[1])
    ]
    spans[0][3:] = [s._replace(start=s.start + 0.01, end=s.end + 0.01) for s in spans[0][3:]]
    measure.write_trace(schedules.Timeline(spans), tmp_path / "trace.json")
    answer = ask("trace", file=(tmp_path / "trace.json").read_text(), file_name="trace.json")
    found = {action: (late, longer) for _, action, _, _, late, longer in answer["differences"]}
    assert found["0F2"] == pytest.approx((0, 0.01), abs=1e-9)
    assert found["1F2"] == pytest.approx((0.01, 0), abs=1e-9)
    assert found["1F1"] == pytest.approx((0, 0), abs=1e-9)


def test_a_schedules_file_stands_beside_the_chosen_schedule(tmp_path):
    schedules.write_csv(schedules.gpipe(4, 8), tmp_path / "own.csv")
    text = (tmp_path / "own.csv").read_text()
    answer = ask("trace", file=text, file_name="own.csv", schedule="one_f_one_b")
    assert len(answer["differences"]) == 64
    differ = {action: late for _, action, _, _, late, _ in answer["differences"]}
    assert differ["0F0"] == 0 and differ["0B0"] == 11 - 4  # when rank 3 begins its first backward


@pytest.mark.parametrize(
    "text, why",
    [
        ("{", "it is not JSON"),
        ("[]", "no event has a duration"),
        ('{"traceEvents": 3}', "no list of traceEvents"),
        ('[{"ph": "X", "name": "GC", "tid": 0, "ts": 0, "dur": 1}]', "'GC' is not an action"),
        ('[{"ph": "X", "name": "0F0", "tid": 0, "ts": "a", "dur": 1}]', ": tid, ts and dur"),
        ('[{"ph": "X", "name": "0F0", "tid": 1, "ts": 0, "dur": 1}]', "no tid 0"),
        ('[{"ph": "X", "name": "0F0", "tid": 0, "ts": 1e308, "dur": 1}]', "numbers from 0 to"),
        ("[" * 100_000, "recursion"),
        ("\x89PNG\r\n", ""),
        ("", ""),
    ],
)
def test_a_file_that_is_no_trace_has_words_of_the_page(text, why):
    error = code("trace", file=text, file_name="picture.png")
    assert error["code"] == "no_trace"
    assert error["values"]["name"] == "picture.png" and why in error["values"]["why"]


# --- calculators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", costs.ALGORITHMS)
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_collective_costs_what_the_package_says(collective, ranks):
    answer = ask("collectives", collective=collective, ranks=str(ranks), bytes="1e6", alpha="1e-5")
    outputs = answer["outputs"]
    arguments = collective, 1e6, ranks, 1e-5, 2.5e-11
    assert outputs["fastest"]["value"] == costs.fastest(*arguments)
    seconds = costs.collective_seconds(*arguments, outputs["fastest"]["value"])
    assert outputs["collective_seconds"]["value"] == seconds
    assert math.isclose(outputs["collective_seconds"]["computed"], seconds, rel_tol=1e-12)
    for algorithm, messages, volume, total in answer["table"]["rows"]:
        if total is None:
            assert (collective, algorithm) in costs.POWER_OF_TWO_ONLY and ranks == 3
        else:
            assert total == costs.collective_seconds(*arguments, algorithm)
            assert math.isclose(messages * 1e-5 + volume * 2.5e-11, total, rel_tol=1e-12)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", ["no", "yes"])
@pytest.mark.parametrize("t", [1, 4])
def test_activations_are_the_formulas(recompute, sequence_parallel, t):
    values = {"recompute": recompute, "sequence_parallel": sequence_parallel}
    answer = ask("activations", sequence="128", tensor_parallel=str(t), **values)
    held = costs.transformer_layer_bytes(128, 1, 4096, 32, t, sequence_parallel == "yes", recompute)
    output = answer["outputs"]["transformer_layer_bytes"]
    assert output["value"] == held == sum(bytes for _, bytes in answer["table"]["rows"])
    assert math.isclose(output["computed"], held, rel_tol=1e-12)
    assert set(activations.FORMULAS) == {
        (r, s) for r in activations.RECOMPUTE for s in ("no", "yes")
    }


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("optimizer", ["adam", "momentum", "sgd"])
def test_zero_holds_what_the_formula_says(stage, precision, optimizer):
    values = {"stage": str(stage), "precision": precision, "optimizer": optimizer}
    answer = ask("zero", ranks="8", **values)
    held = costs.zero_bytes(7e9, 8, stage, precision, optimizer)
    output = answer["outputs"]["zero_bytes"]
    assert output["value"] == held and math.isclose(output["computed"], held, rel_tol=1e-12)
    assert [row[1] for row in answer["table"]["rows"]] == [
        costs.zero_bytes(7e9, 8, each, precision, optimizer) for each in range(4)
    ]
    assert zero.for_each("bf16", "adam") == {"k": 12, "g": 2, "w": 2}


def test_the_planner_answers_as_its_command_line_does(capsys, tmp_path, monkeypatch):
    from naranhi.planning.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(planning.MODELS["Llama 2 7B"]))
    options = ["--gpus", "16", "--sequence", "4096", "--batch", "64"]
    assert main(["--model", "config.json", *options]) == 0
    printed = capsys.readouterr().out
    values = {"gpus": "16", "sequence_length": "4096", "global_batch": "64"}
    answer = ask("planning", **values)
    assert answer["text"] in printed
    assert all(command in printed for command in answer["commands"].values())
    assert "naranhi.train --config config.json --dp" in printed
    for row in answer["table"]["rows"]:
        assert f"{row[1]:7.3g} s {row[2]:8.3g}" in printed and row[0] in printed
    for engine in ("megatron", "fsdp", "nanotron"):
        outputs = ask("planning", **values, engine=engine)["outputs"]
        for name in ("step_seconds", "memory_bytes"):
            assert sum(outputs[name]["sum"].values()) == pytest.approx(outputs[name]["value"])


def test_models_have_the_parameters_that_their_names_say():
    said = {"GPT-2 XL": 1.56e9, "Llama 2 7B": 6.74e9, "Llama 3 70B": 70.6e9, "Llama 3 405B": 406e9}
    said["Mixtral 8x7B"] = 46.7e9
    from naranhi.planning import Model

    found = {name: Model.from_config(sizes).parameters for name, sizes in planning.MODELS.items()}
    assert found == pytest.approx(said, rel=0.005)


def test_nothing_fits_is_an_answer():
    answer = ask("planning", model="Llama 3 405B", gpus="8", gpu="A100-40GB")
    assert "None of" in answer["text"] and "table" not in answer


def test_a_formula_is_computed_as_it_is_shown():
    assert put_in("(p - 1) * x / max(p, 2)", p=4, x=0.5) == ("(4 − 1) × 0.5 / max(4, 2)", 0.375)
    assert put_in("b * beta", b=1e-5, beta=2.0) == ("1e-05 × 2", 2e-05)
    assert collectives.in_a_row("all_reduce", 80, 4, "ring") == (6, 120)
    assert {*closed_forms.CLOSED} == {"bubble_rate", "cost", "peak_activations", "messages"}
