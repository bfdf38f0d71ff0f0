"""Models as people have them: small random ones of `transformers`, and some that people write.

Each is a `Model`: how to make it, what to give it, how to get its loss, which modules LoRA adapts.
Nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # as torch's own documentation has it

transformers = pytest.importorskip("transformers")

Inputs = dict[str, Any]


def _loss_of(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output.loss


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        make: Builds it, from the random state as it is.
        inputs: Makes what its forward takes, by name.
        loss: Gets the loss from what its forward returns.
        lora: Names of the modules that LoRA adapts; empty where it is not tried.
        saved: Names of the modules that are trained beside the adapters (`modules_to_save`).
        checkpointing: Whether it has `gradient_checkpointing_enable`.
        quick: Whether the default run tries it.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]
    loss: Callable[[Any], Any] = _loss_of
    lora: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    checkpointing: bool = True
    quick: bool = False


def _of(name: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    """Return how to build a model of transformers from its class's and its configuration's name."""

    def make() -> nn.Module:
        model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**settings))
        return model

    return make


# -- inputs ----------------------------------------------------------------------------------------


def _words(size: int = 50, *shape: int) -> Tensor:
    return torch.randint(2, size, shape or (2, 6))


def _text() -> Inputs:
    """Return words with padding in one of the rows, and labels."""
    words = _words()
    mask = torch.ones_like(words)
    mask[1, -2:] = 0
    return {
        "input_ids": words,
        "attention_mask": mask,
        "labels": words.masked_fill(mask == 0, -100),
    }


def _plain_text() -> Inputs:
    words = _words()
    return {"input_ids": words, "labels": words}


def _chunks() -> Inputs:
    """Return as many words as chunks need."""
    words = _words(50, 2, 8)
    return {"input_ids": words, "labels": words}


def _pairs() -> Inputs:
    return _text() | {"next_sentence_label": torch.tensor([0, 1])}


def _translation() -> Inputs:
    return _text() | {"labels": _words(50, 2, 5)}


def _pictures(size: int = 8) -> Tensor:
    return torch.randn(2, 3, size, size)


def _labelled(size: int = 8) -> Callable[[], Inputs]:
    return lambda: {"pixel_values": _pictures(size), "labels": torch.tensor([0, 1])}


def _captions() -> Inputs:
    words = _words()
    words[:, -1] = 49
    return {"input_ids": words, "pixel_values": _pictures(), "return_loss": True}


def _speech() -> Inputs:
    return {"input_features": torch.randn(2, 8, 16), "labels": _words(50, 2, 5)}


def _waves() -> Inputs:
    return {
        "input_values": torch.randn(2, 400),
        "attention_mask": torch.ones(2, 400, dtype=torch.long),
        "labels": _words(20, 2, 3),
    }


def _waves_to_tell_apart() -> Inputs:
    """Return what Wav2Vec2 is pretrained with: what to mask, and what to tell it from."""
    steps = 39
    mask = torch.zeros(2, steps, dtype=torch.bool)
    mask[:, 3:9] = True
    return {
        "input_values": torch.randn(2, 400),
        "mask_time_indices": mask,
        "sampled_negative_indices": torch.randint(0, 2 * steps, (2, steps, 3)),
    }


def _objects() -> Inputs:
    return {
        "pixel_values": _pictures(32),
        "labels": [
            {"class_labels": torch.tensor([0, 1]), "boxes": torch.rand(2, 4) / 2 + 0.2},
            {"class_labels": torch.tensor([1]), "boxes": torch.rand(1, 4) / 2 + 0.2},
        ],
    }


def _points() -> Inputs:
    return {"pixel_values": _pictures(16), "input_points": torch.rand(2, 1, 2, 2) * 16}


def _series() -> Inputs:
    return {
        "past_values": torch.randn(2, 15),
        "past_time_features": torch.randn(2, 15, 1),
        "past_observed_mask": torch.ones(2, 15),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }


_SMALL = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
_SMALL_DECODER = _SMALL | {
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_SMALL_SEQ2SEQ = {
    "vocab_size": 50,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
_SMALL_WAVES = _SMALL | {
    "vocab_size": 20,
    "conv_dim": (8, 8),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_length": 2,
    "num_codevectors_per_group": 4,
    "num_codevector_groups": 2,
    "codevector_dim": 8,
    "proj_codevector_dim": 8,
}


# -- written by hand -------------------------------------------------------------------------------


class UNet(nn.Module):
    """A small diffusion model: noise is added at a random time and predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 8))
        self.begin = nn.Conv2d(3, 8, 3, padding=1)
        self.down = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, 2, 1))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.end = nn.Conv2d(16, 3, 3, padding=1)
        self.register_buffer("alphas", torch.linspace(0.99, 0.01, 10))

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the loss of one step of denoising."""
        times = torch.randint(0, 10, (len(pictures),), device=pictures.device)
        noise = torch.randn_like(pictures)
        alpha = self.get_buffer("alphas")[times][:, None, None, None]
        noisy = alpha.sqrt() * pictures + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.predict(noisy, times), noise)

    def predict(self, noisy: Tensor, times: Tensor) -> Tensor:
        """Return the noise that is in pictures."""
        waves = times[:, None] * torch.exp(-torch.arange(4.0))[None]
        emb = self.time(torch.cat([waves.sin(), waves.cos()], -1))
        first = self.begin(noisy) + emb[:, :, None, None]
        low = self.down(first)
        rows = low.flatten(2).transpose(1, 2)
        rows = rows + self.attention(rows, rows, rows, need_weights=False)[0]
        low = rows.transpose(1, 2).reshape(low.shape)
        result: Tensor = self.end(torch.cat([self.up(low), first], 1))
        return result


class Block(nn.Module):
    """torchvision's basic block, in-place activations included."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(after)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(after)
        self.downsample = nn.Sequential(
            nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add what two convolutions make of x to x."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        result: Tensor = self.relu(out)
        return result


class ResNet(nn.Module):
    """A small residual network with a head that is not used, as GoogLeNet's in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(True)
        )
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2))
        self.fc = nn.Linear(12, 3)
        self.auxiliary = nn.Linear(8, 3)
        self.register_buffer("running_accuracy", torch.zeros(()))

    def forward(self, pictures: Tensor, labels: Tensor) -> Tensor:
        """Return the loss; keep a running accuracy."""
        early = self.stem(pictures)
        self.auxiliary(early.mean((2, 3)))
        logits = self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layers(early), 1), 1))
        accuracy = (logits.argmax(-1) == labels).float().mean()
        self.get_buffer("running_accuracy").mul_(0.9).add_(accuracy * 0.1)
        return F.cross_entropy(logits, labels)


class VectorQuantizer(nn.Module):
    """A codebook with a straight-through estimator and a moving average of its use."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(6, 4)
        self.register_buffer("counts", torch.zeros(6))

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return the nearest codes, and the codebook's and the commitment loss."""
        distances = torch.cdist(z, self.codes.weight)
        nearest = distances.argmin(-1)
        with torch.no_grad():
            used = F.one_hot(nearest, 6).float().sum(0)
            self.get_buffer("counts").mul_(0.9).add_(used, alpha=0.1)
        chosen = self.codes(nearest)
        loss = F.mse_loss(chosen, z.detach()) + 0.25 * F.mse_loss(z, chosen.detach())
        return z + (chosen - z).detach(), loss


class VQVAE(nn.Module):
    """An autoencoder through a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 8), nn.GELU(), nn.Linear(8, 4))
        self.quantizer = VectorQuantizer()
        self.decoder = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 12))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss."""
        codes, of_codes = self.quantizer(self.encoder(x))
        loss: Tensor = F.mse_loss(self.decoder(codes), x) + of_codes
        return loss


class VAE(nn.Module):
    """An autoencoder through a normal distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(12, 8)
        self.decoder = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        """Return the negative lower bound."""
        mean, log_variance = self.encoder(x).chunk(2, -1)
        normal = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
        prior = torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        divergence = torch.distributions.kl_divergence(normal, prior).sum(-1).mean()
        return F.mse_loss(self.decoder(normal.rsample()), x) + 0.1 * divergence


class Translator(nn.Module):
    """Two LSTMs with attention, packed sequences, scheduled sampling."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, padding_idx=0)
        self.encoder = nn.LSTM(8, 8, batch_first=True, bidirectional=True)
        self.bridge = nn.Linear(16, 8)
        self.decoder = nn.LSTMCell(16, 8)
        self.query = nn.Linear(8, 16, bias=False)
        self.out = nn.Linear(24, 20)

    def forward(self, words: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a translation, half of whose words are guesses of its own."""
        packed = nn.utils.rnn.pack_padded_sequence(
            self.words(words), lengths, batch_first=True, enforce_sorted=False
        )
        packed, (state, _) = self.encoder(packed)
        memory, _ = nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)
        mask = torch.arange(memory.shape[1])[None] < lengths[:, None]
        h = self.bridge(torch.cat([state[0], state[1]], -1)).tanh()
        c = torch.zeros_like(h)
        context = memory.new_zeros(len(words), 16)
        word, losses = torch.ones_like(labels[:, 0]), []
        for step in range(labels.shape[1]):
            h, c = self.decoder(torch.cat([self.words(word), context[:, :8]], -1), (h, c))
            scores = (memory @ self.query(h)[:, :, None]).squeeze(-1)
            weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
            context = (weights[:, :, None] * memory).sum(1)
            logits = self.out(torch.cat([h, context], -1))
            losses.append(F.cross_entropy(logits, labels[:, step]))
            word = logits.argmax(-1) if torch.rand(()) < 0.5 else labels[:, step]
        return torch.stack(losses).mean()


class Experts(nn.Module):
    """A mixture of experts: the best two of four by a router's softmax, with a loss for balance."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss."""
        chances = self.router(x).softmax(-1)
        weights, chosen = chances.topk(2, -1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            if len(rows):
                result.index_add_(0, rows, expert(x[rows]) * weights[rows, place, None])
        share = F.one_hot(chosen, 4).float().mean((0, 1))
        balance = 4 * (share * chances.mean(0)).sum()
        loss: Tensor = F.cross_entropy(self.head(result), labels) + 0.01 * balance
        return loss


class Momentum(nn.Module):
    """BYOL's step: a student predicts what a teacher says, which follows by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(
            nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)
        )
        self.predictor = nn.Linear(4, 4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of both views, and let the teacher follow."""
        self.follow()
        one, other = x + 0.1 * torch.randn_like(x), x * torch.rand_like(x)
        with torch.no_grad():
            goals = self.teacher(other), self.teacher(one)
        guesses = self.predictor(self.student(one)), self.predictor(self.student(other))
        losses = [
            2 - 2 * F.cosine_similarity(p, z).mean() for p, z in zip(guesses, goals, strict=True)
        ]
        return losses[0] + losses[1]

    @torch.no_grad()
    def follow(self) -> None:
        """Move the teacher a little towards the student."""
        for mine, his in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mine.mul_(0.99).add_(his, alpha=0.01)


# -- the table -------------------------------------------------------------------------------------


def _resnet_config() -> Any:
    return transformers.ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 8, 8, 8],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage4"],
    )


def _detr() -> Any:
    config = transformers.DetrConfig(
        **{k: v for k, v in _SMALL_SEQ2SEQ.items() if k not in ("vocab_size", "pad_token_id")},
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone_config=_resnet_config(),
        num_queries=4,
        num_labels=2,
        auxiliary_loss=True,
    )
    return transformers.DetrForObjectDetection(config)


def _clip() -> Any:
    text = _SMALL | {"eos_token_id": 49, "projection_dim": 8}
    return transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=_SMALL_VISION, projection_dim=8)
    )


def _sam() -> Any:
    vision = {
        "hidden_size": 16,
        "output_channels": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "window_size": 2,
        "global_attn_indexes": [1],
        "mlp_dim": 16,
        "num_pos_feats": 4,
    }
    prompt = {"hidden_size": 8, "image_size": 16, "patch_size": 4, "mask_input_channels": 4}
    mask = {
        "hidden_size": 8,
        "mlp_dim": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 8,
    }
    return transformers.SamModel(
        transformers.SamConfig(
            vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask
        )
    )


def _reformer() -> nn.Module:
    """Return a Reformer that a seed makes repeatable: it asks the system for seeds of its own."""
    model: nn.Module = _of(
        "ReformerModelWithLMHead",
        "ReformerConfig",
        vocab_size=50,
        hidden_size=16,
        feed_forward_size=24,
        num_attention_heads=2,
        attention_head_size=8,
        attn_layers=["local", "lsh"],
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
        axial_pos_shape=[2, 4],
        axial_pos_embds_dim=[8, 8],
        max_position_embeddings=8,
        is_decoder=True,
    )()
    plain = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with mock.patch.object(torch, "seed", return_value=7):
            return plain(*args, **kwargs)

    model.forward = forward
    return model


MODELS: dict[str, Model] = {
    "gpt2": Model(
        _of(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=50,
            n_embd=16,
            n_layer=2,
            n_head=2,
            n_positions=32,
            bos_token_id=1,
            eos_token_id=2,
        ),
        _text,
        lora=("c_attn", "c_proj"),
        quick=True,
    ),
    "llama": Model(
        _of("LlamaForCausalLM", "LlamaConfig", **_SMALL_DECODER),
        _text,
        lora=("q_proj", "v_proj"),
        saved=("lm_head",),
    ),
    "mixtral": Model(
        _of(
            "MixtralForCausalLM",
            "MixtralConfig",
            **_SMALL_DECODER,
            num_local_experts=4,
            output_router_logits=True,
        ),
        _text,
        lora=("q_proj", "o_proj"),
    ),
    "qwen2_moe": Model(
        _of(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            **_SMALL_DECODER,
            num_experts=4,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            output_router_logits=True,
        ),
        _text,
        lora=("q_proj", "v_proj"),
    ),
    "deepseek_v3": Model(
        _of(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            **_SMALL_DECODER | {"num_key_value_heads": 2},
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            moe_intermediate_size=8,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=8,
        ),
        _text,
        lora=("q_a_proj", "o_proj"),
    ),
    "bert": Model(
        _of("BertForPreTraining", "BertConfig", **_SMALL),
        _pairs,
        lora=("query", "value"),
    ),
    "bert_masked": Model(
        _of("BertForMaskedLM", "BertConfig", **_SMALL),
        _text,
        lora=("query",),
    ),
    "distilbert": Model(
        _of(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=50,
            dim=16,
            hidden_dim=24,
            n_layers=2,
            n_heads=2,
            max_position_embeddings=32,
        ),
        lambda: _text() | {"labels": torch.tensor([0, 1])},
        lora=("q_lin", "v_lin"),
        saved=("classifier",),
        quick=True,
    ),
    "deberta_v2": Model(
        _of(
            "DebertaV2ForMaskedLM",
            "DebertaV2Config",
            **_SMALL,
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
        ),
        _text,
        lora=("query_proj",),
    ),
    "t5": Model(
        _of(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
        ),
        _translation,
        lora=("q", "v"),
    ),
    "switch": Model(
        _of(
            "SwitchTransformersForConditionalGeneration",
            "SwitchTransformersConfig",
            vocab_size=50,
            d_model=16,
            d_kv=8,
            d_ff=24,
            num_layers=2,
            num_heads=2,
            num_experts=2,
            decoder_start_token_id=0,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
        ),
        _translation,
        lora=("q", "v"),
    ),
    "bart": Model(
        _of(
            "BartForConditionalGeneration",
            "BartConfig",
            **_SMALL_SEQ2SEQ,
            max_position_embeddings=32,
        ),
        _translation,
        lora=("q_proj", "v_proj"),
    ),
    "vit": Model(
        _of("ViTForImageClassification", "ViTConfig", **_SMALL_VISION),
        _labelled(),
        lora=("q_proj", "v_proj"),
        saved=("classifier",),
    ),
    "vit_mae": Model(
        _of(
            "ViTMAEForPreTraining",
            "ViTMAEConfig",
            **_SMALL_VISION,
            decoder_hidden_size=16,
            decoder_num_hidden_layers=1,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=16,
            mask_ratio=0.5,
        ),
        lambda: {"pixel_values": _pictures()},
        lora=("q_proj",),
    ),
    "swin": Model(
        _of(
            "SwinForImageClassification",
            "SwinConfig",
            image_size=16,
            patch_size=2,
            embed_dim=8,
            depths=[2, 1],
            num_heads=[2, 2],
            window_size=2,
        ),
        _labelled(16),
        lora=("q_proj", "v_proj"),
    ),
    "clip": Model(_clip, _captions, lora=("q_proj", "v_proj"), quick=True),
    "whisper": Model(
        _of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            **_SMALL_SEQ2SEQ,
            num_mel_bins=8,
            max_source_positions=8,
            max_target_positions=16,
        ),
        _speech,
        lora=("q_proj", "v_proj"),
    ),
    "mamba": Model(
        _of(
            "MambaForCausalLM",
            "MambaConfig",
            vocab_size=50,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=2,
        ),
        _plain_text,
        lora=("in_proj", "x_proj"),
    ),
    "mamba2": Model(
        _of(
            "Mamba2ForCausalLM",
            "Mamba2Config",
            vocab_size=50,
            hidden_size=16,
            state_size=4,
            num_hidden_layers=1,
            num_heads=4,
            head_dim=8,
            n_groups=1,
            chunk_size=4,
        ),
        _plain_text,
        lora=("in_proj",),
    ),
    "recurrent_gemma": Model(
        _of(
            "RecurrentGemmaForCausalLM",
            "RecurrentGemmaConfig",
            **_SMALL_DECODER | {"num_hidden_layers": 3},
            lru_width=16,
            attention_window_size=8,
        ),
        _text,
        lora=("q_proj",),
    ),
    "wav2vec2_ctc": Model(
        _of(
            "Wav2Vec2ForCTC",
            "Wav2Vec2Config",
            **_SMALL_WAVES,
            pad_token_id=0,
            ctc_loss_reduction="mean",
        ),
        _waves,
        lora=("q_proj", "v_proj"),
    ),
    "wav2vec2": Model(
        _of("Wav2Vec2ForPreTraining", "Wav2Vec2Config", **_SMALL_WAVES),
        _waves_to_tell_apart,
        lora=("q_proj", "v_proj"),
    ),
    "detr": Model(_detr, _objects, lora=("q_proj", "v_proj")),
    "sam": Model(
        _sam,
        _points,
        lambda output: output.pred_masks.square().mean(),
        lora=("qkv",),
    ),
    "reformer": Model(_reformer, _chunks, checkpointing=False),
    "bloom": Model(
        _of("BloomForCausalLM", "BloomConfig", vocab_size=50, hidden_size=16, n_layer=2, n_head=2),
        _text,
        lora=("query_key_value",),
    ),
    "big_bird": Model(
        _of("BigBirdForMaskedLM", "BigBirdConfig", **_SMALL, attention_type="original_full"),
        _text,
        lora=("query",),
    ),
    "longformer": Model(
        _of("LongformerForMaskedLM", "LongformerConfig", **_SMALL, attention_window=4),
        _text,
        lora=("query",),
    ),
    "xlnet": Model(
        _of(
            "XLNetLMHeadModel",
            "XLNetConfig",
            vocab_size=50,
            d_model=16,
            n_layer=2,
            n_head=2,
            d_inner=24,
        ),
        _text,
        checkpointing=False,
    ),
    "time_series": Model(
        _of(
            "TimeSeriesTransformerForPrediction",
            "TimeSeriesTransformerConfig",
            prediction_length=4,
            context_length=12,
            lags_sequence=[1, 2, 3],
            num_time_features=1,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
        ),
        _series,
        lora=("q_proj",),
    ),
    "encodec": Model(
        _of(
            "EncodecModel",
            "EncodecConfig",
            num_filters=4,
            hidden_size=8,
            codebook_size=8,
            codebook_dim=8,
            upsampling_ratios=[2, 2],
            num_lstm_layers=1,
            num_residual_layers=1,
        ),
        lambda: {"input_values": torch.randn(1, 1, 64)},
        lambda output: output.audio_values.square().mean(),
        checkpointing=False,
    ),
    "dac": Model(
        _of(
            "DacModel",
            "DacConfig",
            encoder_hidden_size=4,
            downsampling_ratios=[2, 2],
            decoder_hidden_size=8,
            n_codebooks=2,
            codebook_size=8,
            codebook_dim=4,
            quantizer_dropout=0.5,
        ),
        lambda: {"input_values": torch.randn(2, 1, 64)},
        lambda output: output.loss.mean() + output.audio_values.square().mean(),
        checkpointing=False,
    ),
    "unet": Model(
        UNet,
        lambda: {"pictures": _pictures()},
        lora=("begin", "time.0"),
        checkpointing=False,
        quick=True,
    ),
    "resnet": Model(
        ResNet,
        lambda: {"pictures": _pictures(), "labels": torch.tensor([0, 1])},
        lora=("conv1", "fc"),
        checkpointing=False,
    ),
    "vqvae": Model(
        VQVAE,
        lambda: {"x": torch.randn(5, 12)},
        lora=("encoder.0", "decoder.0"),
        checkpointing=False,
    ),
    "vae": Model(VAE, lambda: {"x": torch.randn(5, 12)}, lora=("encoder",), checkpointing=False),
    "translator": Model(
        Translator,
        lambda: {
            "words": _words(20, 3, 5),
            "lengths": torch.tensor([5, 2, 4]),
            "labels": _words(20, 3, 4),
        },
        lora=("bridge", "out"),
        checkpointing=False,
    ),
    "experts": Model(
        Experts,
        lambda: {"x": torch.randn(3, 8), "labels": torch.tensor([0, 1, 2])},
        lora=("router", "experts.0"),
        checkpointing=False,
    ),
    "byol": Model(
        Momentum, lambda: {"x": torch.randn(5, 12)}, lora=("predictor",), checkpointing=False
    ),
}
