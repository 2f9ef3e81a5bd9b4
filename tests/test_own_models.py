"""Networks from words and files: what fits is loaded as it was saved, what does not is named."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from mixval.errors import UserError
from mixval.models import mlp
from mixval.offline.models import load_models, network_fingerprint

SHAPE = (1, 8, 8)
MLP = "{name: mlp, hidden: [6]}"


@pytest.fixture
def network():
    torch.manual_seed(0)
    return mlp(SHAPE, 10, hidden=[6])


def load(word, classes=10):
    return load_models(word, "base", SHAPE, classes)[0].network


def same(one, other):
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("wrap", ["plain", "state_dict", "model", "module.", "_orig_mod."])
def test_every_kind_of_checkpoint_gives_back_the_weights(tmp_path, network, wrap):
    state = network.state_dict()
    if wrap in ("state_dict", "model"):
        state = {wrap: state, "epoch": 3}
    elif wrap != "plain":
        state = {f"{wrap}{name}": tensor for name, tensor in state.items()}
    torch.save(state, tmp_path / "w.pt")
    assert same(load(f"{MLP}@{tmp_path}/w.pt"), network)


def test_safetensors_and_timm_and_more_outputs_than_classes(tmp_path, network):
    save_file(network.state_dict(), tmp_path / "w.safetensors")
    assert same(load(f"{MLP}@{tmp_path}/w.safetensors", classes=3), network)
    import timm

    theirs = timm.create_model("test_resnet", num_classes=7, in_chans=1)
    torch.save(theirs.state_dict(), tmp_path / "t.pt")
    assert same(load(f"test_resnet@{tmp_path}/t.pt", classes=5), theirs)


def test_a_network_that_is_given_is_copied(network):
    (loaded,) = load_models(network, "base", SHAPE, 10)
    assert loaded.network is not network and same(loaded.network, network)
    assert len(load_models([network, network], "base", SHAPE, 10)) == 2


def test_fingerprints_see_weights_layers_and_code(network):
    before = network_fingerprint(network, {})
    assert before == network_fingerprint(network, {})
    assert before != network_fingerprint(network, {"own:net": "ab"})
    assert before != network_fingerprint(nn.Sequential(*network, nn.ReLU()), {})
    with torch.no_grad():
        network[1].bias[0] += 1e-6
    assert before != network_fingerprint(network, {})
    network_fingerprint(network.bfloat16(), {})


def test_own_code_is_run_and_its_source_is_in_the_fingerprint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "from torch import nn\ndef net(*, k=10): return nn.Linear(64, k)\ndef no(): pass\n"
    (tmp_path / "nets_of_mine.py").write_text(code)
    assert load("{name: 'nets_of_mine:net', k: 4}").out_features == 4
    with pytest.raises(UserError, match=r"nets_of_mine:no must return an nn\.Module, got NoneType"):
        load("nets_of_mine:no")
    with pytest.raises(UserError, match="no function 'nett'; did you mean 'net'"):
        load("nets_of_mine:nett")


BAD = {
    "resnet81@w.pt": "neither mixval nor timm has a model 'resnet81'; did you mean 'resnet18'?",
    "mlp": "'mlp' has no weights; give NAME@FILE",
    "mlp@none.pt": "no file 'none.pt'",
    "mlp@text.pt": "text.pt can't be read as weights",
    "mlp@text.safetensors": "text.safetensors can't be read as weights",
    "mlp@list.pt": "list.pt must hold a state dict of tensors",
    "mlp@w.pt": "w.pt does not fit mlp: '1.weight' is (6, 64), the model has (256, 64)",
    "{name: mlp, hidden: [6, 6]}@w.pt": "does not fit mlp: '3.weight' is (10, 6), the model has",
    "{name: mlp, hidden: []}@w.pt": "does not fit mlp: it has '3.weight', which the model has not",
    "{name: mlp, hidden: [6]}@few.pt": "does not fit mlp: it has no '3.bias'",
    "{name: mlp, hidden: [6]}@more.pt": "it has 'extra', which the model has not",
    "{name: mlp, hiden: [6]}@w.pt": "hiden: unknown key; did you mean 'hidden'?",
    "{name: mlp, hidden: [6}@w.pt": "must be NAME@FILE or module:function",
    "no_module_here:net": "no module 'no_module_here'",
}


@pytest.mark.parametrize("word", BAD)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch, network, word):
    monkeypatch.chdir(tmp_path)
    state = network.state_dict()
    torch.save(state, "w.pt")
    torch.save({name: t for name, t in state.items() if name != "3.bias"}, "few.pt")
    torch.save({**state, "extra": torch.zeros(1)}, "more.pt")
    torch.save([1, 2], "list.pt")
    for name in ("text.pt", "text.safetensors"):
        (tmp_path / name).write_text("not weights")
    with pytest.raises(UserError, match=re.escape(BAD[word])) as caught:
        load(word)
    assert "\n" not in str(caught.value)


def test_a_pickle_that_runs_code_is_not_run(tmp_path):
    import pickle

    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "hacked"), "w"))

    (tmp_path / "w.pt").write_bytes(pickle.dumps({"a": Evil()}))
    with pytest.raises(UserError, match="can't be read as weights"):
        load(f"{MLP}@{tmp_path}/w.pt")
    assert not (tmp_path / "hacked").exists()
