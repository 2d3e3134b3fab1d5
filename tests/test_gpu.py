"""On a GPU: the same bits as on the CPU, and a linear that trains. Skipped where there is none."""

import warnings

import pytest
import torch
from torch import nn

import quatrain as qt

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8"])
def test_codes_and_scales_are_those_of_the_cpu(name: str) -> None:
    """Of each format's defaults; `test_triton` and `test_blocks_triton` walk through the specs."""
    spec = qt.QuantSpec(name, rounding="stochastic")
    for x in (torch.randn(33, 77).bfloat16(), torch.zeros(4, 32).bfloat16()):
        a, b = (qt.quantize(x.to(device), spec, seed=3, offset=5) for device in ("cpu", "cuda"))
        for part in ("codes", "scales", "amax"):
            left, right = getattr(a, part), getattr(b, part).cpu()
            assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), part
        assert torch.equal(a.dequantize(), b.dequantize().cpu())


def test_linear_follows_the_cpu() -> None:
    results = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 96))
        x = torch.randn(64, 256)
        qt.apply(model, qt.load_recipe("nvfp4").to_toml().replace("last_share = 0.15", "last_share = 0.0"))
        model.to(device)
        model(x.to(device)).square().sum().backward()
        results.append([p.grad.cpu() for p in model.parameters()])
        assert qt.rng_state(model).tolist() == [1]
    for a, b in zip(*results, strict=True):  # accumulation order may flip a rare code between the two
        assert (a - b).norm() < 2e-2 * a.norm()


def make_step(recipe: str) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    qt.apply(model, qt.load_recipe(recipe).to_toml().replace("last_share = 0.15", "last_share = 0.0"))
    return model, torch.randn(128, 256, device="cuda")


def weights_after_three_steps(graphed: bool) -> list[torch.Tensor]:
    model, x = make_step("nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def backward() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(x).square().mean().backward()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    if graphed:
        with torch.cuda.graph(graph):
            backward()
    qt.set_rng_state(model, torch.zeros(1, dtype=torch.int64))
    for _ in range(3):
        graph.replay() if graphed else backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_a_cuda_graph_quantizes_new_weights_and_draws_new_bits() -> None:
    """Replays of a captured step give what eager steps give, weights changing in between."""
    eager, replayed = weights_after_three_steps(False), weights_after_three_steps(True)
    for a, b in zip(eager, replayed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_no_tokens(recipe: str) -> None:
    """An expert that got no token trains along with zero gradients."""
    text = qt.load_recipe(recipe).to_toml().replace("last_share = 0.15", "last_share = 0.0")
    model = nn.Sequential(nn.Linear(256, 256)).cuda()
    qt.apply(model, text.replace("first_blocks = 1", "first_blocks = 0").replace("last_blocks = 2", "last_blocks = 0"))
    x = torch.zeros(0, 256, device="cuda", requires_grad=True)
    model(x).sum().backward()
    assert x.grad.shape == x.shape and not model[0].weight.grad.any()


def test_nothing_waits_for_the_device() -> None:
    model, x = make_step("nvfp4")
    model(x).sum().backward()
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            model(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_checkpointing_gives_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    gradients = []
    for again in (False, True):
        model, x = make_step("nvfp4")
        x.requires_grad_()
        y = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.square().sum().backward()
        gradients.append([x.grad, *(p.grad for p in model.parameters())])
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)


def test_autocast_and_compile_on_the_gpu() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 128)).cuda()
    qt.apply(model, "nvfp4-plain")
    compiled = torch.compile(model, fullgraph=True)
    x = torch.randn(128, 256, device="cuda")
    outputs = []
    for m in (model, compiled):
        model.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = m(x)
        y.float().square().sum().backward()
        outputs.append((y, model[0].weight.grad.clone()))
    assert torch.equal(outputs[0][0], outputs[1][0]) and torch.equal(outputs[0][1], outputs[1][1])
    assert outputs[0][1].dtype == torch.float32
