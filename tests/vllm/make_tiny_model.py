"""Makes a model that a real vLLM serves on any machine: `python make_tiny_model.py FOLDER`.

A tokenizer trained on this repository's own prose and a configuration of four small layers; no weights, which vLLM
makes up by `--load-format dummy`. It needs `tokenizers`, which comes with vLLM: run it by the Python of vLLM's own
virtual environment. What such a model says is nonsense; how it is booted, compiled, counted and logged is not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

ROOT = Path(__file__).parents[2]
END_OF_TEXT, BEGIN_OF_TURN, END_OF_TURN = "<end-of-text>", "<turn>", "</turn>"
TEMPLATE = (
    "{%- for message in messages -%}"
    f"{BEGIN_OF_TURN}{{{{ message.role }}}}: {{{{ message.content }}}}{END_OF_TURN}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{BEGIN_OF_TURN}assistant: {{%- endif -%}}"
)


def write(folder: Path, name: str, content: object) -> None:
    """One JSON file of the model."""
    (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def main() -> None:
    """Make it."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteLevelBPETokenizer()
    prose = [str(ROOT / "orchestrator/prompts.txt"), *map(str, sorted((ROOT / "docs").glob("*.md")))]
    tokenizer.train(
        prose, vocab_size=2048, special_tokens=[END_OF_TEXT, BEGIN_OF_TURN, END_OF_TURN], show_progress=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END_OF_TURN)
    write(
        folder,
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TURN,
            "pad_token": END_OF_TEXT,
            "model_max_length": 4096,
            "chat_template": TEMPLATE,
        },
    )
    write(
        folder,
        "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 256,
            "intermediate_size": 688,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": tokenizer.token_to_id(END_OF_TEXT),
            "eos_token_id": end,
        },
    )
    write(folder, "generation_config.json", {"eos_token_id": end})


if __name__ == "__main__":
    main()
