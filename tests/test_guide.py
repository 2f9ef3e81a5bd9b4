"""The guide of other people's loops: its loss against loops over rows, and what it leaves alone."""

import copy
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.data import Mixup
from torch import nn
from torch.nn import functional as F
from torchvision.transforms import v2

import mixval
from mixval import filter_policies
from mixval.losses import cross_entropy
from mixval.posteriors import ensemble, point
from mixval.rhat import Scorer
from mixval.types import MixScores

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
CLASSES = 4
quick = settings(deadline=None, derandomize=True, max_examples=40)


def network(seed: int, classes: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Flatten(), nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, classes)).double()


def student(seed: int = 9) -> nn.Module:
    """Return a network whose rows do not depend on each other."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(9, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def mixes(rows: int = 12, seed: int = 0):
    rng = np.random.default_rng(seed)
    x_mix = torch.from_numpy(rng.standard_normal((rows, 1, 3, 3)))
    y_a, y_b = torch.from_numpy(rng.integers(0, CLASSES, (2, rows)))
    return x_mix, y_a, y_b, torch.from_numpy(rng.random(rows))


def soft_targets(y_a, y_b, lam):
    one, other = F.one_hot(y_a, CLASSES), F.one_hot(y_b, CLASSES)
    return lam[:, None] * one + (1 - lam[:, None]) * other


def loop(teachers, logits, x_mix, y_a, y_b, lam, weigh):
    """Return r_hat and the loss with the formulas of the module, number by number."""
    spoken = [copy.deepcopy(teacher).eval()(x_mix).tolist() for teacher in teachers]
    logits = logits.tolist()
    r_hats, total = [], 0.0
    for row in range(len(lam)):

        def h(all_logits, row=row):
            parts = [math.exp(z) for z in all_logits[row]]
            own, other = (math.log(parts[int(y[row])] / sum(parts)) for y in (y_a, y_b))
            return -float(lam[row]) * own - (1 - float(lam[row])) * other

        r_hats.append(sum(h(z) for z in spoken) / len(spoken) - h(logits))
        total += weigh(r_hats[-1]) * h(logits)
    return r_hats, total / len(lam)


WEIGH = {
    "negative": (lambda r: float(r <= 0), "negative"),
    "soft": (lambda r: 1 / (1 + math.exp(r / 0.3)), {"name": "soft", "tau": 0.3}),
    "own": (lambda r: min(1.0, abs(r)), lambda scores: scores.r_hat.abs().clamp(max=1)),
}


@pytest.fixture
def _own_randomness():
    """What timm, torchvision and the examples draw from is shared: seeded, and put back."""
    state = np.random.get_state()
    np.random.seed(0)
    with torch.random.fork_rng():
        yield
    np.random.set_state(state)


# -- the numbers --------------------------------------------------------------------------


@quick
@given(st.integers(1, 20), st.integers(1, 3), st.sampled_from(sorted(WEIGH)), st.integers(0, 99))
def test_the_loss_is_that_of_loops_over_rows_and_teachers(rows, num_teachers, name, seed):
    # Catches a wrong sign, a division by the kept count, and H of an averaged prediction.
    weigh, chosen = WEIGH[name]
    teachers = [network(k + seed) for k in range(num_teachers)]
    guide = mixval.Guide(teachers, filter=chosen)
    x_mix, *pair = mixes(rows, seed)
    logits = 2 * student()(x_mix)
    r_hats, expected = loop(teachers, logits, x_mix, *pair, weigh)
    assert guide.loss(logits, x_mix, *pair).item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert guide.score(logits, x_mix, *pair).r_hat.tolist() == pytest.approx(r_hats, abs=1e-9)
    weights = guide.weights(logits, x_mix, *pair)
    assert weights.tolist() == pytest.approx([weigh(r) for r in r_hats], abs=1e-9)
    assert guide.kept == pytest.approx(weights.mean().item())


def test_both_signs_of_r_hat_occur():
    # The control of this file: with one sign only, a filter could be wrong and nobody knew.
    x_mix, *pair = mixes(40)
    weights = mixval.Guide(network(0)).weights(2 * student()(x_mix), x_mix, *pair)
    assert 0.1 < weights.mean() < 0.9


def test_soft_targets_and_pairs_are_one_thing():
    # Catches two paths: equal labels must add their masses, and lam may be one number.
    guide, (x_mix, y_a, y_b, lam) = mixval.Guide(network(0), filter="negative"), mixes(30)
    assert (y_a == y_b).any()
    logits = student()(x_mix)
    soft = guide.loss(logits, x_mix, targets=soft_targets(y_a, y_b, lam))
    assert guide.loss(logits, x_mix, y_a, y_b, lam).item() == pytest.approx(soft.item())
    one = guide.loss(logits, x_mix, y_a, y_b, 0.3)
    every = guide.loss(logits, x_mix, y_a, y_b, torch.full((30,), 0.3, dtype=torch.float64))
    assert torch.equal(one, every)
    short = guide.loss(logits, x_mix, y_a.to(torch.uint8), y_b.to(torch.int32), np.float64(0.3))
    assert torch.equal(one, short)


def test_the_weights_are_those_of_the_scorer_and_the_filter():
    # Catches a guide that decides otherwise than the students of mixval.
    x_mix, y_a, y_b, lam = mixes(30)
    logits, rng = student()(x_mix), np.random.default_rng(0)
    for teacher in (point([network(0)]), ensemble([network(0), network(1)])):
        targets = mixval.mixed_targets(y_a, y_b, lam, CLASSES)
        base = logits.detach().log_softmax(-1)[None]
        scored = Scorer(teacher, cross_entropy)(x_mix, targets, base)
        scores = MixScores(scored.r_hat, scored.updated, scored.base, lam, rng)
        for name, options in {"negative": {}, "top_k": {"k": 4}, "soft": {"tau": 0.2}}.items():
            guide = mixval.Guide(teacher, filter={"name": name, **options})
            expected = getattr(filter_policies, name)(scores, **options)
            assert torch.equal(guide.weights(logits, x_mix, y_a, y_b, lam), expected)
        own = guide.score(logits, x_mix, y_a, y_b, lam)
        for term in ("r_hat", "updated", "base", "std_error", "soft_labels"):
            torch.testing.assert_close(getattr(own, term), getattr(scored, term), equal_nan=True)


def test_a_list_of_networks_a_module_list_and_their_posterior_are_one_thing():
    networks, (x_mix, *pair) = [network(0), network(1)], mixes(20)
    logits = student()(x_mix)
    forms = [networks, tuple(networks), nn.ModuleList(networks), ensemble(networks)]
    forms.append([network(0), point([network(1)])])
    scores = [mixval.Guide(form).score(logits, x_mix, *pair).r_hat for form in forms]
    assert all(torch.equal(scores[0], other) for other in scores[1:])


def test_confident_asks_several_teachers_and_refuses_one():
    x_mix, y_a, y_b, lam = mixes(40)
    logits = student()(x_mix).detach()
    teachers = [network(seed) for seed in range(4)]
    guide = mixval.Guide(teachers, {"name": "confident", "level": 0.8})
    scored = guide.score(logits, x_mix, y_a, y_b, lam)
    probable = mixval.probability_negative(scored.r_hat.numpy(), scored.std_error.numpy(), 4)
    weights = guide.weights(logits, x_mix, y_a, y_b, lam).numpy()
    np.testing.assert_array_equal(weights == 1, probable >= 0.8)
    assert 0 < weights.sum() < 40
    with pytest.raises(ValueError, match="at least 2 draws"):
        mixval.Guide(teachers[0], "confident").weights(logits, x_mix, y_a, y_b, lam)


def test_a_filter_of_ones_own_sees_what_it_may_need():
    seen = []

    def keep_all(scores):
        seen.append(scores)
        return torch.ones_like(scores.r_hat)

    guide, (x_mix, y_a, y_b, lam) = mixval.Guide(network(0), filter=keep_all), mixes()
    logits = student()(x_mix)
    loss = guide.loss(logits, x_mix, y_a, y_b, lam)
    expected = F.cross_entropy(logits, soft_targets(y_a, y_b, lam))
    assert loss.item() == pytest.approx(expected.item())
    guide.loss(logits, x_mix, targets=soft_targets(y_a, y_b, lam))
    assert torch.equal(seen[0].lam, lam)
    torch.testing.assert_close(seen[0].r_hat, seen[0].updated - seen[0].base)
    torch.testing.assert_close(seen[1].lam, soft_targets(y_a, y_b, lam).amax(1))


@pytest.mark.usefixtures("_own_randomness")
@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_what_timm_and_torchvision_return_goes_in(mode):
    # Catches a form of soft targets that is refused, such as smoothed or single-precision ones.
    teacher, x, y = network(0).float(), *[mixes(20)[k] for k in (0, 1)]
    guide, own = mixval.Guide(teacher), student().float()
    mixup = Mixup(1.0, 1.0, mode=mode, label_smoothing=0.1, num_classes=CLASSES)
    transforms = [mixup, v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)]
    for transform in transforms:
        x_mix, targets = transform(x.float().clone(), y)
        logits = own(x_mix)
        each = F.cross_entropy(logits, targets, reduction="none")
        updated = F.cross_entropy(copy.deepcopy(teacher).eval()(x_mix), targets, reduction="none")
        expected = each[updated <= each].sum() / 20
        assert guide.loss(logits, x_mix, targets=targets).item() == pytest.approx(
            expected.item(), rel=1e-5
        )


def test_stopped_guidance_is_plain_mixup_and_runs_no_teacher():
    def never(inputs, fold=None):
        raise AssertionError("the teacher was run")

    guide, (x_mix, y_a, y_b, lam) = mixval.Guide(never), mixes()
    assert math.isnan(guide.kept)
    guide.on = False
    logits = student()(x_mix)
    loss = guide.loss(logits, x_mix, y_a, y_b, lam)
    assert loss.item() == pytest.approx(F.cross_entropy(logits, soft_targets(y_a, y_b, lam)).item())
    assert guide.kept == 1.0


# -- what is left alone -------------------------------------------------------------------


def test_the_teacher_is_a_frozen_copy():
    # Catches BatchNorm statistics that move, dropout that is on, a mode or a gradient that leaks.
    teacher = network(0).train()
    before = copy.deepcopy(teacher.state_dict())
    guide, (x_mix, *pair) = mixval.Guide(teacher), mixes()
    first = guide.score(student()(x_mix), x_mix, *pair).r_hat
    guide.loss(student()(x_mix), x_mix, *pair).backward()
    assert teacher.training and all(module.training for module in teacher.modules())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in teacher.parameters())
    with torch.no_grad():
        teacher[-1].weight.zero_()  # goes on to be trained
    assert torch.equal(guide.score(student()(x_mix), x_mix, *pair).r_hat, first)


def test_gradients_flow_through_the_students_loss_alone():
    # Catches a gradient through the weights: `soft` is smooth in the student's own logits.
    guide = mixval.Guide(network(0), filter={"name": "soft", "tau": 0.1})
    x_mix, y_a, y_b, lam = mixes()
    logits = student()(x_mix).detach().requires_grad_()
    x_mix.requires_grad_()
    lam.requires_grad_()
    guide.loss(logits, x_mix, y_a, y_b, lam).backward()
    targets = soft_targets(y_a, y_b, lam.detach()).requires_grad_()
    loss = guide.loss(logits.detach().requires_grad_(), x_mix, targets=targets)
    loss.backward()
    assert x_mix.grad is None and lam.grad is None and targets.grad is None
    weights = guide.weights(logits, x_mix, y_a, y_b, lam)
    assert not weights.requires_grad and not weights.is_inference()
    # of -sum_k y_k log p_k by hand: p - y
    expected = weights[:, None] * (logits.softmax(-1) - targets) / 12
    torch.testing.assert_close(logits.grad, expected.detach())


def test_a_filter_that_learned_or_inferred_can_be_trained_with():
    # Catches a weight that backward can't save, and one that a filter's own graph hangs on.
    slope = torch.ones((), dtype=torch.float64, requires_grad=True)

    @torch.inference_mode()
    def inferred(scores):
        return torch.sigmoid(scores.r_hat)

    x_mix, *pair = mixes()
    for chosen in (inferred, lambda scores: torch.sigmoid(slope * scores.r_hat)):
        logits = student()(x_mix).detach().requires_grad_()
        mixval.Guide(network(0), filter=chosen).loss(logits, x_mix, *pair).backward()
        assert logits.grad.abs().sum() > 0 and slope.grad is None


def test_nothing_random_is_drawn():
    # Catches a guided run that differs from its control by the numbers drawn, not the filter.
    guide, (x_mix, *pair) = mixval.Guide(network(0)), mixes()
    logits, before = student()(x_mix), torch.get_rng_state()
    guide.loss(logits, x_mix, *pair)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_teacher_goes_where_the_inputs_are():
    # No second device here but `meta`, which computes shapes only: enough to see the move.
    where, probe = [], network(0)
    probe[-1].register_forward_hook(lambda module, _, out: where.append(module.weight))
    guide, (x_mix, *pair) = mixval.Guide(probe), mixes()
    guide.loss(student()(x_mix), x_mix, *pair)
    there = guide._draws(torch.Size([12, CLASSES]), x_mix.to("meta"))
    assert there.device == where[1].device == torch.device("meta")
    assert where[0].device == probe[-1].weight.device == torch.device("cpu")
    assert not where[1].is_inference() and where[0] is not probe[-1].weight


# -- steps of several parts ---------------------------------------------------------------


def gradient_of(model, parts, guide):
    """Return the gradient of one optimiser step, accumulated over its micro-batches."""
    model.zero_grad()
    for x_mix, *pair in parts:
        (guide.loss(model(x_mix), x_mix, *pair) / len(parts)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("chosen", ["negative", {"name": "soft", "tau": 0.1}])
def test_four_micro_batches_give_the_gradient_of_one_batch(chosen):
    # Catches a micro-batch that is divided by what it kept.
    guide, model, whole = mixval.Guide(network(0), filter=chosen), student(), mixes(32)
    quarters = list(zip(*[part.split(8) for part in whole], strict=True))
    at_once = gradient_of(model, [whole], guide)
    torch.testing.assert_close(gradient_of(model, quarters, guide), at_once)
    assert at_once.abs().max() > 1e-3


def test_a_filter_that_compares_rows_sees_the_micro_batch():
    # As documented: 2 of each quarter are not 8 of the whole.
    x_mix, *pair = mixes(32)
    logits = student()(x_mix)
    guide = mixval.Guide(network(0), filter={"name": "low_fraction", "fraction": 0.25})
    parts = zip(*[part.split(8) for part in (logits, x_mix, *pair)], strict=True)
    assert [guide.weights(*part).sum().item() for part in parts] == [2, 2, 2, 2]


def test_a_batch_of_which_nothing_is_kept_has_a_gradient_of_zero():
    # Catches 0/0, and a loss without a graph, which backward and DDP would refuse.
    guide = mixval.Guide(network(0), filter=lambda scores: torch.zeros_like(scores.r_hat))
    assert not gradient_of(student(), [mixes()], guide).any() and guide.kept == 0


RANKS = """
import json, os, sys
import torch
sys.path.insert(0, {tests!r})
from test_guide import gradient_of, mixes, network, student
import mixval
torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
model = torch.nn.parallel.DistributedDataParallel(student())
share = [part[rank::2] for part in mixes(16)]
found = gradient_of(model, [share], mixval.Guide(network(0)))
if rank == 0:
    with open("found.json", "w") as file:
        json.dump(found.tolist(), file)
torch.distributed.barrier()
torch.distributed.destroy_process_group()
os._exit(0)
"""


@pytest.mark.slow
def test_two_ranks_average_to_the_gradient_of_one_process(tmp_path):
    (tmp_path / "script.py").write_text(RANKS.format(tests=str(Path(__file__).parent)))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = [sys.executable, *launcher, "script.py"]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **pipes) as process:
        try:
            errors = process.communicate(timeout=120)[1]
        except BaseException:
            process.terminate()  # it ends those who wait for each other
            raise
    assert process.returncode == 0, errors[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    alone = gradient_of(student(), [mixes(16)], mixval.Guide(network(0)))
    assert found == pytest.approx(alone.tolist(), abs=1e-12)


# -- precision ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_float32(dtype):
    # Catches a sum in 8 bits of mantissa: the loss must be that of the rounded logits.
    seen, teacher, own = [], network(0).float(), student().float()
    teacher[-1].register_forward_hook(lambda module, _, out: seen.append(out.dtype))
    guide, (x_mix, y_a, y_b, lam) = mixval.Guide(teacher), mixes(30)
    x_mix = x_mix.float()
    with torch.autocast("cpu", dtype):
        logits = own(x_mix)
        loss = guide.loss(logits, x_mix, y_a, y_b, lam)
        scored = guide.score(logits, x_mix, y_a, y_b, lam)
        spoken = copy.deepcopy(teacher).eval()(x_mix)
    assert logits.dtype == dtype and loss.dtype == scored.r_hat.dtype == torch.float32
    assert seen[0] == dtype  # the teacher ran as the caller runs
    targets = soft_targets(y_a, y_b, lam.float())
    each = F.cross_entropy(logits.float(), targets, reduction="none")
    updated = F.cross_entropy(spoken.float(), targets, reduction="none")
    torch.testing.assert_close(scored.r_hat, (updated - each).detach())
    torch.testing.assert_close(loss, each[updated <= each].sum() / 30)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.any() for p in own.parameters())


def test_outside_autocast_the_teacher_runs_in_full():
    seen, teacher = [], network(0).float()
    teacher[-1].register_forward_hook(lambda module, _, out: seen.append(out.dtype))
    guide, (x_mix, *pair) = mixval.Guide(teacher), mixes()
    with torch.autocast("cpu", torch.bfloat16):
        logits = student().float()(x_mix.float())
    guide.loss(logits, x_mix.float(), *pair)
    assert seen == [torch.float32]


# -- wrong input --------------------------------------------------------------------------


def changed(**changes):
    x_mix, y_a, y_b, lam = mixes()
    given = {"logits": student()(x_mix), "x_mix": x_mix, "y_a": y_a, "y_b": y_b, "lam": lam}
    return {**given, **changes}


SOFT = torch.full((12, CLASSES), 1 / CLASSES)
PAIR = {"y_a": None, "y_b": None, "lam": None}
HOLE = torch.zeros(12, CLASSES).index_fill(0, torch.tensor([3]), torch.nan)
WRONG = {
    "lam below": ({"lam": -0.1}, r"lam: .*\[0, 1\], got -0.1"),
    "lam above": ({"lam": torch.linspace(0, 1.5, 12)}, r"lam: .*got 0 to 1.5"),
    "lam is NaN": ({"lam": math.nan}, "lam: .*got nan"),
    "lam of another size": ({"lam": torch.ones(3)}, r"lam: .*\(12,\), got \(3,\)"),
    "label too large": ({"y_a": torch.full((12,), 4)}, "y_a: must be 0 to 3.*got 4 to 4"),
    "label below": ({"y_b": torch.full((12,), -1)}, "y_b: must be 0 to 3.*got -1 to -1"),
    "labels of another size": ({"y_b": torch.zeros(5).long()}, r"y_b: .*\(12,\).*got \(5,\)"),
    "labels that are soft": ({"y_a": SOFT}, "y_a: .*soft targets go in as targets="),
    "NaN logits": ({"logits": HOLE}, "logits: must be finite, .* in 1 of 12 rows"),
    "infinite logits": ({"logits": HOLE.nan_to_num(torch.inf)}, "logits: must be finite"),
    "logits with places": ({"logits": torch.zeros(12, 4, 2)}, r"logits: .*got \(12, 4, 2\)"),
    "whole logits": ({"logits": torch.zeros(12, 4).long()}, "logits: must be floats"),
    "no rows": ({"logits": torch.zeros(0, 4), "x_mix": torch.zeros(0, 9)}, "logits: .*at least"),
    "another number of rows": ({"x_mix": mixes(7)[0]}, r"x_mix: .*12 of logits, got \(7, 1, 3, 3"),
    "both": ({"targets": SOFT}, "targets: give either .* got y_a, y_b, lam, targets"),
    "neither": (PAIR, "targets: give either .* got none of them"),
    "half a pair": ({"y_b": None}, "targets: give either .* got y_a, lam"),
    "a pair and no lam": ({"lam": None}, "targets: give either .* got y_a, y_b"),
    "targets of another shape": ({**PAIR, "targets": SOFT[:, :3]}, r"targets: .*got \(12, 3\)"),
    "targets below": ({**PAIR, "targets": SOFT - 1}, "targets: must be at least 0"),
    "targets that are NaN": ({**PAIR, "targets": HOLE}, "targets: must be at least 0"),
    "many labels": ({**PAIR, "targets": SOFT * 2}, "targets: must add up to 1 .*got sums 2"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("verb", ["loss", "weights", "score"])
def test_wrong_input_is_named(case, verb):
    changes, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        getattr(mixval.Guide(network(0)), verb)(**changed(**changes))


class Pair(nn.Module):
    """A network that returns more than logits."""

    def forward(self, inputs):
        return inputs, inputs


TEACHERS = {
    "other classes": (network(0, classes=3), r"teacher: .*\(12, 4\), got \(12, 3\)"),
    "one class, which would be spread": (network(0, classes=1), r"teacher: .*got \(12, 1\)"),
    "two that differ": ([network(0), network(0, classes=3)], r"teacher: .*got \(12, 3\)"),
    "features": (nn.Identity(), "teacher: .*got"),
    "a pair": (Pair(), "teacher: must return a tensor of logits, got .*tuple"),
    "flat draws": (lambda x, fold=None: torch.zeros(12, 4), "teacher: .*got"),
    "NaN": (lambda x, fold=None: torch.full((1, 12, 4), torch.nan), "teacher: must be finite"),
    "none": ([], "teacher: .*at least one"),
    "a word": ("resnet18", "teacher: must be a network"),
}


@pytest.mark.parametrize("case", TEACHERS)
def test_a_wrong_teacher_is_named(case):
    teacher, message = TEACHERS[case]
    with pytest.raises(ValueError, match=message):
        mixval.Guide(teacher).loss(**changed())


FILTERS = {
    "unknown": ("negativ", "filter: .*did you mean 'negative'"),
    "parameter": ({"name": "soft", "tau": 0}, "filter: soft: tau: .*greater than 0, got 0"),
    "missing": ("top_k", "filter: top_k: k: must be given"),
    "of a run": ({"name": "yoked", "of": "guided"}, "filter: must not be 'yoked'"),
    "a number": (3, "filter: needs the name"),
    "above 1": (lambda s: s.r_hat * 0 + 2, r"filter: .*\[0, 1\], got 2"),
    "NaN weights": (lambda s: s.r_hat * torch.nan, "filter: .*got nan"),
    "a number for all": (lambda s: s.r_hat.mean(), r"filter: .*\(12,\), got \(\)"),
    "a list": (lambda s: s.r_hat.tolist(), "filter: .*got .*list"),
}


@pytest.mark.parametrize("case", FILTERS)
def test_a_wrong_filter_is_named(case):
    chosen, message = FILTERS[case]
    with pytest.raises(ValueError, match=message):
        mixval.Guide(network(0), filter=chosen).loss(**changed())


# -- the examples -------------------------------------------------------------------------


def check_report(printed: str) -> None:
    words = printed.split()
    accuracy, kept = float(words[words.index("accuracy") + 1][:-1]), words[words.index("kept") + 1]
    assert accuracy > 0.8 and 0.2 < float(kept) < 0.95, printed


@pytest.mark.usefixtures("_own_randomness")
@pytest.mark.parametrize("name", ["plain_pytorch", "timm_loop", "torchvision_cutmix"])
def test_the_examples_train(name, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    check_report(capsys.readouterr().out)


@pytest.mark.lightning
def test_the_lightning_example_trains(tmp_path):
    # In a process of its own: Lightning warns, and sets up signals and loggers.
    command = [sys.executable, str(EXAMPLES / "lightning_module.py")]
    finished = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    check_report(finished.stdout)


def test_every_example_is_short_and_tested():
    files = {path.stem: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    tested = {"plain_pytorch", "timm_loop", "torchvision_cutmix", "lightning_module"}
    assert set(files) == tested | {"digits"} and max(files.values()) < 60
