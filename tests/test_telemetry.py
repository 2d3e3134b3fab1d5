"""Signal-to-noise per operand, and bytes held for the backward pass."""

import math

import pytest
import torch
from torch import nn

import quatrain as qt
from quatrain.nn import OPERANDS
from quatrain.telemetry import operand_snr, saved_bytes, snr


def model_and_loss() -> tuple[nn.Module, object]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    qt.apply(model, qt.load_recipe("nvfp4").to_toml().replace("last_share = 0.15", "last_share = 0.0"))
    x = torch.randn(256, 128)
    return model, lambda: model(x).exp().square().mean()  # exp saves its own output


def test_snr_of_gaussian_data() -> None:
    x = torch.randn(512, 512)
    assert abs(snr(x, qt.QuantSpec()) - -20 * math.log10(0.0952)) < 0.15
    assert snr(x, qt.QuantSpec("fp8")) > 30
    assert math.isnan(snr(torch.zeros(4, 16), qt.QuantSpec()))
    assert snr(torch.full((4, 16), 6.0), qt.QuantSpec()) == 200.0


def test_operand_snr_covers_every_row_and_disturbs_nothing() -> None:
    model, loss = model_and_loss()
    loss().backward()
    grads, clock = [p.grad.clone() for p in model.parameters()], qt.rng_state(model)
    table = operand_snr(model, loss)
    assert list(table) == ["0", "2"] and set(table["2"]) == set(OPERANDS)
    assert all(10 < v < 25 for row in table.values() for v in row.values())
    assert torch.equal(qt.rng_state(model), clock)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert not model[0]._forward_hooks and not model[0]._backward_pre_hooks
    assert operand_snr(nn.Linear(3, 3), lambda: torch.zeros(())) == {}


def test_saved_bytes_counts_each_storage_once_and_no_parameter() -> None:
    model, loss = model_and_loss()
    plain = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    x = torch.randn(256, 128)
    quantized = saved_bytes(loss, model)["bytes"]
    full = saved_bytes(lambda: plain(x).square().mean(), plain)["bytes"]
    # plain: x, relu's result (shared with the second linear), y; ours: two packed operands, relu's result, y
    assert full == 4 * 256 * (128 + 128 + 64)
    assert quantized == pytest.approx(256 * 128 * 2 * 0.5625 + 4 * 256 * (128 + 64), rel=0.01)


def test_measuring_frees_the_graph_it_measured() -> None:
    import gc
    import weakref

    from quatrain.train.savings import linear_bytes_per_element

    for measure in (lambda m, f: saved_bytes(f, m), linear_bytes_per_element, operand_snr):
        model, loss = model_and_loss()
        measure(model, loss)
        alive = weakref.ref(model[0])
        del model, loss
        gc.collect()
        assert alive() is None
