"""Balances compared by predicted step time: pipeworker's, even ones, torchgpipe's and DeepSpeed's.

The facts are counted from the shapes of well-known networks: operations, at so many a second, and
bytes in float32 with AdamW. torchgpipe's ``balance_by_time`` and ``balance_by_size`` divide a list
of numbers into blocks whose largest sum is the smallest (Bárány and Grinberg 2015); here that
division is exact. DeepSpeed's ``parameters`` does the same with the numbers of parameters. The
columns are each balance's predicted step in ms, its layers by stage, and its share of the speed of
the planned balance.

python benchmarks/balance.py [--stages 4] [--microbatches 16] [--schedule 1f1b]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from pipeworker.facts.layer_facts import LayerFacts, LayerSkip, NetworkFacts
from pipeworker.plan.orders import resolve
from pipeworker.plan.partition import even
from pipeworker.plan.placement import Placement
from pipeworker.plan.planner.planner import plan_order
from pipeworker.plan.planner.stages import Divisions

OPERATIONS = 10e12
"""Operations a second of the accelerator that the facts are of."""
FLOAT = 4


def layer(kind: str, operations: float, parameters: int, output: int, saved: int) -> LayerFacts:
    """Return the facts of a layer: operations of its forward, and numbers of float32 elements."""
    forward, size = operations / OPERATIONS, parameters * FLOAT
    return LayerFacts(
        kind,
        parameters=parameters,
        parameter_bytes=size,
        gradient_bytes=size,
        optimizer_bytes=2 * size,
        forward=forward,
        backward=2 * forward,
        backward_input=forward,
        update=8 * parameters / OPERATIONS,
        saved_bytes=saved * FLOAT,
        output_bytes=output * FLOAT,
    )


def network(
    layers: Sequence[LayerFacts], skips: Sequence[tuple[int, int]] = (), loss: float = 0.0
) -> NetworkFacts:
    """Return the facts of layers on workers that are linked by 10 GB/s."""
    return NetworkFacts(
        tuple(layers),
        skips=tuple(LayerSkip(a, b, layers[a].output_bytes) for a, b in skips),
        loss=loss,
        latency=20e-6,
        seconds_per_byte=1e-10,
    )


def transformer(vocabulary: int = 50_000, width: int = 1024, depth: int = 24) -> NetworkFacts:
    """Return a decoder with a large vocabulary: 512 tokens a micro-batch."""
    tokens = 512
    block = 12 * width * width
    attention = 2 * tokens * tokens * width
    layers = [layer("Embedding", tokens * width, vocabulary * width, tokens * width, tokens)]
    layers += [
        layer(
            "Block", 2 * tokens * block + 2 * attention, block, tokens * width, 16 * tokens * width
        )
        for _ in range(depth)
    ]
    logits = tokens * vocabulary
    layers.append(layer("Head", 2 * logits * width, vocabulary * width, logits, logits))
    return network(layers, loss=10 * logits / OPERATIONS)


def convolution(kind: str, size: int, inputs: int, outputs: int, kernel: int = 3) -> LayerFacts:
    """Return a convolution with norm and activation, of one image of `size` squared outputs."""
    pixels = size * size
    weights = kernel * kernel * inputs * outputs
    return layer(kind, 2 * pixels * weights, weights, pixels * outputs, 3 * pixels * outputs)


def unet(size: int = 256, width: int = 64, depth: int = 4) -> NetworkFacts:
    """Return a U-Net: two convolutions for each resolution, down and up, with skips across."""
    layers: list[LayerFacts] = []
    ends = []
    channels = 3
    for level in range(depth):
        for _ in range(2):
            layers.append(convolution("Down", size >> level, channels, width << level))
            channels = width << level
        ends.append(len(layers) - 1)
    for _ in range(2):
        layers.append(convolution("Bottom", size >> depth, channels, width << depth))
        channels = width << depth
    skips = []
    for level in reversed(range(depth)):
        skips.append((ends[level], len(layers)))
        channels += width << level
        for _ in range(2):
            layers.append(convolution("Up", size >> level, channels, width << level))
            channels = width << level
    layers.append(convolution("Output", size, channels, 1, 1))
    return network(layers, skips)


def resnet101() -> NetworkFacts:
    """Return ResNet-101 by bottlenecks (He et al. 2015), of one image of 224 squared pixels."""
    layers = [convolution("Stem", 112, 3, 64, 7)]
    channels = 64
    for size, width, blocks in ((56, 64, 3), (28, 128, 4), (14, 256, 23), (7, 512, 3)):
        for _ in range(blocks):
            weights = channels * width + 9 * width * width + 4 * width * width
            if channels != 4 * width:
                weights += channels * 4 * width
            pixels = size * size
            saved = pixels * 12 * width
            layers.append(
                layer("Bottleneck", 2 * pixels * weights, weights, pixels * 4 * width, saved)
            )
            channels = 4 * width
    layers.append(layer("Head", 2 * 2048 * 1000, 2_049_000, 1000, 2048))
    return network(layers)


def amoebanet(cells: int = 18, width: int = 208) -> NetworkFacts:
    """Return a network shaped as AmoebaNet-D: a stem, three groups of cells, each twice as wide."""
    layers = [convolution("Stem", 112, 3, width // 4)]
    size, channels = 56, width
    for group in range(3):
        for _ in range(cells // 3):
            weights = 10 * channels * channels // 4
            pixels = size * size
            saved = 20 * pixels * channels
            layers.append(layer("Cell", 2 * pixels * weights, weights, pixels * channels, saved))
        if group < 2:
            size, channels = size // 2, 2 * channels
            layers.append(convolution("Reduce", size, channels // 2, channels, 1))
    layers.append(layer("Head", 2 * channels * 1000, channels * 1000, 1000, channels))
    return network(layers)


def uneven() -> NetworkFacts:
    """Return 24 equal layers of which one takes ten times as long."""
    layers = [layer("Linear", 2e8, 1 << 18, 1 << 16, 1 << 16) for _ in range(24)]
    layers[7] = layer("Large", 2e9, 1 << 18, 1 << 16, 1 << 16)
    return network(layers)


NETWORKS: dict[str, Callable[[], NetworkFacts]] = {
    "Transformer, vocabulary of 50,000": transformer,
    "U-Net": unet,
    "ResNet-101": resnet101,
    "AmoebaNet-like": amoebanet,
    "one layer ten times the others": uneven,
}


def blocks(values: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return the balance of consecutive blocks whose largest sum is the smallest."""
    count = len(values)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    # best[n]: of the first n values in the present number of blocks, the largest sum and the cuts.
    best: list[tuple[float, tuple[int, ...]]] = [(sums[n], (n,)) for n in range(count + 1)]
    for part in range(1, parts):
        best = [
            min(
                (
                    (max(best[cut][0], sums[stop] - sums[cut]), (*best[cut][1], stop - cut))
                    for cut in range(part, stop)
                ),
                default=(float("inf"), ()),
            )
            for stop in range(count + 1)
        ]
    return best[count][1]


def balances(facts: NetworkFacts, stages: int) -> dict[str, tuple[int, ...]]:
    """Return the balances that other rules choose."""
    layers = facts.layers
    return {
        "even": even(len(layers), stages),
        "by time": blocks([x.forward + x.backward for x in layers], stages),
        "by size": blocks([2 * x.saved_bytes + 4 * x.parameter_bytes for x in layers], stages),
        "parameters": blocks([x.parameters for x in layers], stages),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--schedule", default="1f1b")
    args = parser.parse_args()
    order, placement = resolve(args.schedule), Placement.identity(args.stages)
    print(f"K={args.stages}, M={args.microbatches}, {args.schedule}; predicted ms a step")
    for name, make in NETWORKS.items():
        facts = make()
        plan = plan_order(facts, order, placement, args.microbatches)
        own = plan.step_seconds
        print(f"{name} ({len(facts.layers)} layers)")
        print(f"  {'planned':12}{own * 1e3:10.1f}   {plan.balance}")
        divisions = Divisions(facts, order, placement, args.microbatches)
        for rule, balance in balances(facts, args.stages).items():
            seconds = divisions.judge(balance).seconds
            print(f"  {rule:12}{seconds * 1e3:10.1f}   {balance}   {own / seconds:.2f}")


if __name__ == "__main__":
    main()
