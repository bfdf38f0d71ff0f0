"""Real models, each recorded for one step of training: what pictures have to be readable for."""
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

import gradtrace


class Bottleneck(nn.Module):
    """ResNet-50's block. Source: He et al. 2015, table 1."""

    def __init__(self, taken: int, width: int, stride: int) -> None:
        super().__init__()
        given = width * 4
        self.conv1, self.bn1 = nn.Conv2d(taken, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, given, 1, bias=False), nn.BatchNorm2d(given)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or taken != given:
            conv = nn.Conv2d(taken, given, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(given))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's features, (N, 4 * width, H, W)."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)  # type: ignore[no-any-return]  # a module's result is Any


class ResNet50(nn.Module):
    """ResNet-50's layers, with fewer channels."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        taken = width
        for number, blocks in enumerate((3, 4, 6, 3)):
            layers = []
            for block in range(blocks):
                stride = 2 if block == 0 and number else 1
                layers.append(Bottleneck(taken, width * 2**number, stride))
                taken = width * 2**number * 4
            setattr(self, f"layer{number + 1}", nn.Sequential(*layers))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(taken, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (N, 10)."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = self.get_submodule(f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))  # type: ignore[no-any-return]  # as above


def resnet50() -> gradtrace.Trace:
    """Return one step of a classifier."""
    model = ResNet50()
    with gradtrace.record(model) as trace:
        logits = model(torch.randn(2, 3, 64, 64))
        loss = functional.cross_entropy(logits, torch.tensor([1, 2]))
        loss.backward()
    return trace


class DoubleConv(nn.Module):
    """Two convolutions, as at every level of a UNet."""

    def __init__(self, taken: int, given: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(taken, given, 3, padding=1), nn.BatchNorm2d(given)
        self.second, self.norm2 = nn.Conv2d(given, given, 3, padding=1), nn.BatchNorm2d(given)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, (N, given, H, W)."""
        return functional.relu(self.norm2(self.second(functional.relu(self.norm1(self.first(x))))))


class UNet(nn.Module):
    """Source: Ronneberger et al. 2015, with fewer channels."""

    def __init__(self, width: int = 4, levels: int = 4) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        takes = [1, *sizes]
        self.down = nn.ModuleList(
            DoubleConv(taken, size) for taken, size in zip(takes, sizes, strict=False)
        )
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(size * 2, size, 2, 2) for size in reversed(sizes[:-1])
        )
        self.merge = nn.ModuleList(DoubleConv(size * 2, size) for size in reversed(sizes[:-1]))
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, (N, 1, H, W)."""
        skips: list[Tensor] = []
        for block in self.down:
            x = block(x if not skips else functional.max_pool2d(x, 2))
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)  # type: ignore[no-any-return]  # as above


def unet() -> gradtrace.Trace:
    """Return one step of a segmentation."""
    model = UNet()
    x = torch.randn(2, 1, 32, 32)
    with gradtrace.record(model) as trace:
        loss = functional.binary_cross_entropy_with_logits(model(x), (x > 0).float())
        loss.backward()
    return trace


def rnn(steps: int = 2_000) -> gradtrace.Trace:
    """Return one step of a recurrent cell that is unrolled in Python."""
    cell, head = nn.RNNCell(4, 8), nn.Linear(8, 1)
    x, h = torch.randn(steps, 1, 4), torch.zeros(1, 8)
    with gradtrace.record({"cell": cell, "head": head}) as trace:
        for t in range(steps):
            h = cell(x[t], h)
        loss = head(h).sum()
        loss.backward()
    return trace


def gan() -> gradtrace.Trace:
    """Return both sides of one step of a convolutional GAN."""
    generator = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 4), nn.BatchNorm2d(16), nn.ReLU(),
        nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.ConvTranspose2d(8, 1, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip
    discriminator = nn.Sequential(
        nn.Conv2d(1, 8, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(8, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.LeakyReLU(0.2),
        nn.Conv2d(16, 1, 4),
    )  # fmt: skip
    real, noise = torch.randn(4, 1, 16, 16), torch.randn(4, 8, 1, 1)
    with gradtrace.record({"generator": generator, "discriminator": discriminator}) as trace:
        fake = generator(noise)
        on_real, on_fake = discriminator(real), discriminator(fake.detach())
        real_loss = functional.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        fake_loss = functional.binary_cross_entropy_with_logits(on_fake, torch.zeros_like(on_fake))
        discriminator_loss = real_loss + fake_loss
        discriminator_loss.backward()
        again = discriminator(fake)
        generator_loss = functional.binary_cross_entropy_with_logits(again, torch.ones_like(again))
        generator_loss.backward()
    return trace


def transformer() -> gradtrace.Trace:
    """Return one step of torch's own encoder and decoder."""
    model = nn.Transformer(16, 2, 3, 3, 32, batch_first=True)
    source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    with gradtrace.record(model) as trace:
        loss = model(source, target).square().mean()
        loss.backward()
    return trace


def lstm() -> gradtrace.Trace:
    """Return one step of a tagger on torch's own LSTM, of which the embedding is frozen."""
    table, cell, head = nn.Embedding(20, 8), nn.LSTM(8, 8, 2, bidirectional=True), nn.Linear(16, 5)
    table.weight.requires_grad_(False)
    tokens = torch.randint(0, 20, (7, 2))
    with gradtrace.record({"table": table, "lstm": cell, "head": head}) as trace:
        logits = head(cell(table(tokens))[0])
        loss = functional.cross_entropy(logits.flatten(0, 1), torch.zeros(14, dtype=torch.long))
        loss.backward()
    return trace


class Byol(nn.Module):
    """An online network that predicts what a slow copy of it sees. Source: Grill et al. 2020."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = self._encoder(), self._encoder()
        self.predictor = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    @staticmethod
    def _encoder() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        """Return the loss."""
        seen = self.predictor(self.online(one))
        with torch.no_grad():
            goal = self.target(other)
        return 2 - 2 * functional.cosine_similarity(seen, goal).mean()


def byol() -> gradtrace.Trace:
    """Return one step with the update of the slow copy after it."""
    model = Byol()
    optimizer = torch.optim.SGD([*model.online.parameters(), *model.predictor.parameters()], 0.1)
    with gradtrace.record(model) as trace:
        loss = model(torch.randn(4, 8), torch.randn(4, 8))
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            pairs = zip(model.target.parameters(), model.online.parameters(), strict=True)
            for slow, quick in pairs:
                slow.lerp_(quick, 0.01)
    return trace


class Experts(nn.Module):
    """A mixture of experts, of which each token takes the best by an argmax."""

    def __init__(self, number: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(8, number)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(number)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what the chosen experts say, (N, 8)."""
        chosen = self.router(x).argmax(dim=-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


def experts() -> gradtrace.Trace:
    """Return one step in which the router learns nothing."""
    torch.manual_seed(0)
    model = Experts()
    with gradtrace.record(model) as trace:
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
    return trace


def bert(layers: int = 12, width: int = 768) -> gradtrace.Trace:
    """Return one step of transformers' BERT; its own defaults make BERT-base."""
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=width, num_hidden_layers=layers)
    model = BertModel(config)
    with gradtrace.record(model) as trace:
        loss = model(torch.randint(0, 100, (1, 8))).last_hidden_state.square().mean()
        loss.backward()
    return trace


def gpt2(layers: int = 12) -> gradtrace.Trace:
    """Return one step of transformers' GPT-2, with fewer channels."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=layers, n_embd=48, n_head=4, vocab_size=100)
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(0, 100, (1, 8))
    with gradtrace.record(model) as trace:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    return trace


def bert_with_a_cut() -> gradtrace.Trace:
    """Return one step of a BERT whose fifth layer passes no gradient on."""
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(hidden_size=48, num_attention_heads=4, intermediate_size=64))
    inner = model.get_submodule("encoder.layer.5.intermediate.dense")
    assert isinstance(inner, nn.Linear)

    def forward(x: Tensor) -> Tensor:
        return functional.linear(x.detach(), inner.weight, inner.bias)

    inner.forward = forward  # type: ignore[assignment]  # a patch, as people write them
    with gradtrace.record(model) as trace:
        loss = model(torch.randint(0, 100, (1, 8))).last_hidden_state.square().mean()
        loss.backward()
    return trace


MODELS: Mapping[str, Callable[[], gradtrace.Trace]] = {
    program.__name__: program
    for program in (
        bert, bert_with_a_cut, byol, experts, gan, gpt2, lstm, resnet50, rnn, transformer, unet,
    )
}  # fmt: skip
