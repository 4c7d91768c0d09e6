"""q, k and v saved from a run, and backends judged on them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_packages import softmax_attention
from test_attention_check import rough

from h3dist import attending
from h3dist.attention import registry
from h3dist.attention.capture import Capturing, Place, read
from h3dist.bench import judge as judging
from h3dist.bench.spec import Spec
from h3dist.bench.steps import denoiser_of, random_weights
from h3dist.comm import Comm
from h3dist.errors import ConfigError, OutputError
from h3dist.plan import Layout
from h3dist.sampling.noise import draw
from h3dist.topology import Ranks

CPU = torch.device("cpu")


def test_one_head_of_every_layer_is_saved_at_three_evaluations(tmp_path: Path) -> None:
    given, attention = [], registry.find("sdpa").build(attending.Task(9, 3, 8, torch.float32, CPU, None), None)
    capturing = Capturing(attention, tmp_path / "made", Place(calls=2, layers=4, evaluations=5), lead=6)
    for _ in range(2 * 4 * 5):
        q, k, v = torch.randn(9, 3, 3, 8).unbind(1)
        given.append((q, k, v))
        torch.testing.assert_close(capturing(q, k, v), softmax_attention(q, k, v), rtol=1e-5, atol=1e-6)
    found = list(read(tmp_path / "made", CPU))
    assert [(each.evaluation, each.layer) for each in found] == [(e, layer) for e in (0, 2, 4) for layer in range(4)]
    for each in found:
        q, k, v = given[2 * (4 * each.evaluation + each.layer)]
        head = each.layer % 3
        assert torch.equal(each.q[:, 0], q[:, head]) and torch.equal(each.k[:, 0], k[:, head])
        assert torch.equal(each.v[:, 0], v[:, head]) and each.lead == 6


def test_a_run_s_own_tensors_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Spec(("64x64x5",), size="small", blocks=2, text_rows=7)
    with Comm.connect(Ranks(), Layout(), CPU) as comm:
        plan = spec.plan("64x64x5", Layout(), dtype="float32", capability=None, steps=2)
        denoiser = denoiser_of(random_weights(plan, 0, CPU), plan, comm)
        task = attending.task_of(plan, 0, CPU)
        attention = attending.capturing(denoiser.view.attention, str(tmp_path), plan, task)
        denoiser.view = replace(denoiser.view, attention=attention)
        for evaluation in range(2):
            denoiser(*draw("comfy", 0, plan.geometry), evaluation)
    assert len(list(tmp_path.iterdir())) == 2 * 2
    backends = registry.find("sdpa"), replace(registry.find("sdpa"), name="rough", exact=False, bound=0.01)
    backends = backends[0], replace(backends[1], build=lambda task, found: rough)
    monkeypatch.setattr(judging, "WHOLE", backends)
    record = judging.judge(tmp_path, CPU)
    assert record["rows"] == plan.rows and record["backends"].keys() == {"sdpa", "rough"}
    errors = {name: [each["error"] for each in told["findings"]] for name, told in record["backends"].items()}
    assert max(errors["sdpa"]) < 1e-6 and all(0.02 < error < 0.04 for error in errors["rough"])
    text = judging.table(record)
    assert "| sdpa |" in text and "| 0.01 | 4 of 4 |" in text
    judging.write(record, tmp_path / "judged.json")


def test_an_empty_folder_and_one_that_cannot_be_made_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds nothing"):
        list(read(tmp_path, CPU))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"attention\.capture="):
        Capturing(softmax_attention, tmp_path / "file" / "x", Place(1, 1, 1), 0)
