"""Makes a small random Qwen3 model with a tokenizer and a chat template. Runs in the engine environment.

    python model.py DIRECTORY [--size tiny|demo|bench]

What is random here is only the weights: the tokenizer is trained on ``corpus.txt`` and ``chat_template.jinja`` treats
history as Qwen3's does. So that a reply, sent back as history, becomes the very tokens that the engine generated, the
model can emit nothing but whole words with their leading space, full stops and commas: the pre-tokenizer splits before
every such piece whatever stands beside it, and every piece is one token. All other tokens (parts of words, bytes,
special tokens) get a logit far below the rest, through a channel of the residual stream that is a constant everywhere.
"""

import argparse
import json
import os
import random
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_SEED = 20


@dataclass(frozen=True, slots=True)
class Size:
    """Shape of the model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int = 2
    head_dim: int = 64


SIZES = {
    "tiny": Size(hidden=256, intermediate=512, layers=4, heads=4),
    "demo": Size(hidden=384, intermediate=1024, layers=8, heads=24),
    "bench": Size(hidden=1024, intermediate=3072, layers=12, heads=16),
}

_MAX_LENGTH = 16384
_DEFAULT_REPLY_TOKENS = 128
_VOCABULARY = 1536
_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
_EMITTED = re.compile(r" [a-z]+|[.,]")

_CHANNEL = 0
"""Dimension of the residual stream that holds the constant."""

_CONSTANT = 2.0
_FORBIDDEN = -60.0

TEXT = Path(__file__).with_name("corpus.txt").read_text()

TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text().strip()


def make_tokenizer() -> Tokenizer:
    """Trains a byte-level BPE tokenizer on `TEXT`: every word of it is one token, any other text splits into parts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=_CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [f" {word}" for word in re.findall(r"[a-z]+", TEXT.lower())]
    tokenizer.train_from_iterator([TEXT, "".join(words)] * 4, trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in _MARKUP])
    return tokenizer


def emitted_ids(tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens that the model may generate: words of `TEXT` with a leading space, full stop and comma."""
    words = {f" {word}" for word in re.findall(r"[a-z]+", TEXT.lower())} | {".", ","}
    pieces = {word: tokenizer.encode(word).ids for word in sorted(words)}
    return sorted(ids[0] for word, ids in pieces.items() if len(ids) == 1 and _EMITTED.fullmatch(word))


def check_round_trip(tokenizer: Tokenizer, rounds: int = 200, length: int = 64) -> None:
    """Raises ValueError unless random replies, put into a conversation, encode to the tokens they were made of."""
    ids = emitted_ids(tokenizer)
    draw = random.Random(_SEED)
    before, after = "<|im_start|>assistant\n", "<|im_end|>\n"
    for _ in range(rounds):
        reply = [draw.choice(ids) for _ in range(length)]
        whole = tokenizer.encode(before + tokenizer.decode(reply) + after).ids
        if whole != [*tokenizer.encode(before).ids, *reply, *tokenizer.encode(after).ids]:
            raise ValueError(f"a reply does not encode to its own tokens: {tokenizer.decode(reply)!r}")


def make_weights(size: Size, vocabulary: int, emitted: Sequence[int]) -> dict[str, torch.Tensor]:
    """Draws the weights. Attention is sharp, so that the reply depends on all of the history and does not repeat."""
    generator = torch.Generator().manual_seed(_SEED)

    def draw(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def residual(columns: int, gain: float) -> torch.Tensor:
        matrix = draw(size.hidden, columns, gain)
        matrix[_CHANNEL] = 0
        return matrix

    embeddings = torch.randn(vocabulary, size.hidden, generator=generator)
    embeddings[:, _CHANNEL] = _CONSTANT
    head = draw(vocabulary, size.hidden, gain=3.0)
    head[:, _CHANNEL] = _FORBIDDEN
    head[list(emitted), _CHANNEL] = 0
    weights = {"model.embed_tokens.weight": embeddings, "lm_head.weight": head}
    weights["model.norm.weight"] = torch.ones(size.hidden)
    for layer in range(size.layers):
        name = f"model.layers.{layer}"
        weights |= {
            f"{name}.input_layernorm.weight": torch.ones(size.hidden),
            f"{name}.post_attention_layernorm.weight": torch.ones(size.hidden),
            f"{name}.self_attn.q_proj.weight": draw(size.heads * size.head_dim, size.hidden),
            f"{name}.self_attn.k_proj.weight": draw(size.kv_heads * size.head_dim, size.hidden),
            f"{name}.self_attn.v_proj.weight": draw(size.kv_heads * size.head_dim, size.hidden),
            f"{name}.self_attn.o_proj.weight": residual(size.heads * size.head_dim, gain=1.5),
            f"{name}.self_attn.q_norm.weight": torch.full((size.head_dim,), 2.0),
            f"{name}.self_attn.k_norm.weight": torch.full((size.head_dim,), 2.0),
            f"{name}.mlp.gate_proj.weight": draw(size.intermediate, size.hidden),
            f"{name}.mlp.up_proj.weight": draw(size.intermediate, size.hidden),
            f"{name}.mlp.down_proj.weight": residual(size.intermediate, gain=1.0),
        }
    return weights


def config_of(size: Size, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "max_position_embeddings": _MAX_LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "torch_dtype": "float32",
    }


def tokenizer_config() -> dict[str, Any]:
    """Returns tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": _MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }


def make_model(directory: Path, size: Size) -> int:
    """Writes the model into ``directory``, which appears only when it is complete. Returns the parameter count."""
    tokenizer = make_tokenizer()
    check_round_trip(tokenizer)
    weights = make_weights(size, tokenizer.get_vocab_size(), emitted_ids(tokenizer))
    draft = directory.with_name(f".{directory.name}-{os.getpid()}")
    draft.mkdir(parents=True)
    tokenizer.save(str(draft / "tokenizer.json"))
    generation = {"eos_token_id": tokenizer.token_to_id("<|im_end|>"), "max_new_tokens": _DEFAULT_REPLY_TOKENS}
    files = {
        "config.json": config_of(size, tokenizer),
        "tokenizer_config.json": tokenizer_config(),
        "generation_config.json": generation,
    }
    for name, content in files.items():
        (draft / name).write_text(json.dumps(content, indent=1))
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(directory, ignore_errors=True)
    draft.rename(directory)
    return sum(tensor.numel() for tensor in weights.values())


def main() -> None:
    """Makes the model that the command line asks for."""
    parser = argparse.ArgumentParser(description="Makes a small random Qwen3 model.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", choices=sorted(SIZES), default="demo")
    options = parser.parse_args()
    count = make_model(options.directory, SIZES[options.size])
    print(f"{count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()
