"""A checkpoint with custom code: a small decoder, right or wrong."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIGURATION = """
from transformers import PreTrainedConfig


class OwnConfig(PreTrainedConfig):
    model_type = "own"

    def __init__(self, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, **kwargs):
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.vocab_size = 256
        self.max_position_embeddings = 256
        super().__init__(**kwargs)
"""

MODEL = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from .configuration_own import OwnConfig


class Attention(nn.Module):
    is_causal = True
    num_key_value_groups = 1

    def __init__(self, config, index):
        super().__init__()
        self.config, self.layer_idx = config, index
        self.heads, self.size = config.num_attention_heads, config.hidden_size
        self.qkv = nn.Linear(self.size, 3 * self.size)
        self.out = nn.Linear(self.size, self.size)

    def forward(self, x, attention_mask=None, **kwargs):
        shape = (*x.shape[:-1], self.heads, -1)
        q, k, v = (each.view(shape).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        y, _ = interface(
            self, q, k, v, attention_mask, scaling=(self.size // self.heads) ** -0.5, **kwargs
        )
        return self.out(y.reshape(*x.shape))


class Block(nn.Module):
    def __init__(self, config, index):
        super().__init__()
        self.attention = Attention(config, index)
        self.norm = nn.LayerNorm(config.hidden_size)
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, **kwargs):
        x = x + self.attention(self.norm(x), **kwargs)
        y = self.norm(x)
        SHIFT
        return x + torch.tanh(self.mlp(y))


class OwnPreTrained(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "model"
    _supports_sdpa = True
    _supports_attention_backend = True


class OwnModel(OwnPreTrained):
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=False,
                **kwargs):
        x = self.embed(input_ids)
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None]
        x = x + self.positions(position_ids)
        mask = create_causal_mask(config=self.config, inputs_embeds=x,
                                  attention_mask=attention_mask, past_key_values=None,
                                  position_ids=position_ids)
        for layer in self.layers:
            x = layer(x, attention_mask=mask)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


class OwnForCausalLM(OwnPreTrained, GenerationMixin):
    def __init__(self, config):
        super().__init__(config)
        self.model = OwnModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self):
        return self.lm_head

    def get_input_embeddings(self):
        return self.model.embed

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        output = self.model(input_ids=input_ids, inputs_embeds=inputs_embeds,
                            attention_mask=attention_mask, **kwargs)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state))
"""

SHIFTED = "y = torch.cat((y[:, :1], y[:, :-1]), 1)"
"""Each token sees the one before it, outside attention: across chunks and sequences as well."""


def write(path: Path, *, shift: bool = False) -> Path:
    """Writes the checkpoint with random weights."""
    path.mkdir(exist_ok=True)
    (path / "configuration_own.py").write_text(CONFIGURATION)
    (path / "modeling_own.py").write_text(MODEL.replace("SHIFT", SHIFTED if shift else "pass"))
    config = {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
        "hidden_size": 64,
        "auto_map": {
            "AutoConfig": "configuration_own.OwnConfig",
            "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        },
    }
    (path / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed.weight": (256, 64), "model.positions.weight": (256, 64)}
    shapes |= {"model.norm.weight": (64,), "model.norm.bias": (64,), "lm_head.weight": (256, 64)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}attention.qkv.weight": (192, 64),
            f"{prefix}attention.qkv.bias": (192,),
        }
        shapes |= {f"{prefix}attention.out.weight": (64, 64), f"{prefix}attention.out.bias": (64,)}
        shapes |= {f"{prefix}norm.weight": (64,), f"{prefix}norm.bias": (64,)}
        shapes |= {f"{prefix}mlp.weight": (64, 64), f"{prefix}mlp.bias": (64,)}
    tensors = {
        name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }
    save_file(tensors, path / "model.safetensors")
    return path
