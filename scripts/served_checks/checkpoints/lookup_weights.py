"""Weights of a model that looks tokens up: its answers are far from ties, and depend on every layer's attention.

With random weights two answers are often nearly equal, and rounding settles which one comes out. Here token t asks
in each layer l for token t + OFFSETS[l], wherever it stands in the context. A position of the residual stream is cut
into blocks of 128 values:

    A        code(t), the token's own; its inner product with any other token's code is small
    B0 B1    the token that layer 0 (1) found, as its code; nearly nothing where the context does not hold it
    B2 B3    the same of layers 2 and 3
    C2 C3    what that found position had found in layers 0 and 1 itself (B1 turned, to be told from B0)
    K        a constant, which keeps the norms' divisors about the same

The output is one answer per block, and blocks differ in strength, so that the strongest block that holds something
decides. A token whose latent is lost, read from another slot, or written by a wrong prefill changes the answer.
What no token answers to goes to the first one (BOS), whose value is empty. BOS itself is answered by one fixed token.
"""

import math

import torch

BLOCK = 128
# Tokens from here on have a code; BOS stands first and takes the weight of a look-up that finds nothing.
BOS, FIRST_TOKEN, AFTER_BOS = 2, 3, 5000
OFFSETS = (5, -7, 11, -13)
A, B0, B1, B2, B3, C2, C3, K = (slice(BLOCK * i, BLOCK * (i + 1)) for i in range(8))
FOUND, FOUND_BEFORE = (B0, B1, B2, B3), (None, None, C2, C3)
# A block that holds the code of token u answers u + distance, and with what strength.
ANSWERS = ((A, 1, 1.0), (B0, 2, 1.5), (B1, -3, 2.2), (B2, 4, 3.2), (B3, -5, 4.6), (C2, 6, 7.5), (C3, -2, 11.0))
LOGIT_SCALE = 5.0
# A found token's score is about this many nats above the others'.
SCORES = (11.0, 14.0)
SINK = 0.6
CONSTANT = 3.0
# Codes are pairs (cos, sin) of this many frequencies; one more value marks BOS.
PAIRS = BLOCK // 2 - 1
CODE = 2 * PAIRS
MARK = CODE


class Codes:
    """Tokens' codes, and the rotation that turns a token's code into that of another at some distance."""

    def __init__(self, generator: torch.Generator) -> None:
        self.angles = torch.rand(PAIRS, generator=generator, dtype=torch.float64) * math.pi

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N] int64 -> [N, 128] float64, of norm sqrt(126)."""
        phases = tokens.double().unsqueeze(-1) * self.angles
        code = torch.stack((phases.cos(), phases.sin()), dim=-1).flatten(-2) * math.sqrt(2)
        return torch.nn.functional.pad(code, (0, BLOCK - CODE))

    def turn(self, distance: int) -> torch.Tensor:
        """[128, 128] float64: code(t) -> code(t + distance)."""
        matrix = torch.zeros(BLOCK, BLOCK, dtype=torch.float64)
        cos, sin = (distance * self.angles).cos(), (distance * self.angles).sin()
        even, odd = torch.arange(0, CODE, 2), torch.arange(1, CODE, 2)
        matrix[even, even], matrix[odd, odd] = cos, cos
        matrix[even, odd], matrix[odd, even] = -sin, sin
        return matrix


class LookupWeights:
    """The weights of a config's layers, embedding and output head.

    Takes hidden_size 1024, kv_lora_rank and q_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128, four layers.
    """

    def __init__(self, config: dict, generator: torch.Generator) -> None:
        self.config, self.generator = config, generator
        self.codes = Codes(generator)

    def embedding(self) -> torch.Tensor:
        """[vocab, hidden]."""
        weight = torch.zeros(self.config["vocab_size"], self.config["hidden_size"], dtype=torch.float64)
        weight[FIRST_TOKEN:, A] = self.codes.of(torch.arange(FIRST_TOKEN, len(weight)))
        weight[BOS, MARK] = math.sqrt(CODE)
        weight[:, K] = CONSTANT
        return weight

    def head(self) -> torch.Tensor:
        """[vocab, hidden]."""
        weight = torch.zeros(self.config["vocab_size"], self.config["hidden_size"], dtype=torch.float64)
        tokens = torch.arange(FIRST_TOKEN, len(weight))
        for block, distance, strength in ANSWERS:
            weight[FIRST_TOKEN:, block] = self.codes.of(tokens - distance) * strength * LOGIT_SCALE / CODE
        weight[AFTER_BOS, A][MARK] = 2 * LOGIT_SCALE / math.sqrt(CODE)
        return weight

    def attention(self, layer: int, owns_indexer: bool) -> dict[str, torch.Tensor]:
        """Weights of `self_attn`, by name."""
        config = self.config
        hidden, heads, rope = config["hidden_size"], config["num_attention_heads"], config["qk_rope_head_dim"]
        nope, value = config["qk_nope_head_dim"], config["v_head_dim"]

        # Latents: A, B0, B1, K. Their norm's divisor, where B0 and B1 are empty, for a residual stream of any length:
        divisor = math.sqrt((1 + CONSTANT**2) / 4)
        latent_from = torch.zeros(config["kv_lora_rank"], hidden, dtype=torch.float64)
        for number, block in enumerate((A, B0, B1, K)):
            latent_from[number * BLOCK : (number + 1) * BLOCK, block] = torch.eye(BLOCK, dtype=torch.float64)
        rope_from = torch.zeros(rope, hidden, dtype=torch.float64)
        rope_from[:, A] = 0.5 * self._normal(rope, BLOCK) / math.sqrt(BLOCK)
        # Queries' residual: A and K.
        q_from = torch.zeros(config["q_lora_rank"], hidden, dtype=torch.float64)
        for number, block in enumerate((A, K)):
            q_from[number * BLOCK : (number + 1) * BLOCK, block] = torch.eye(BLOCK, dtype=torch.float64)

        # Each head compares codes in a basis of its own.
        match = CODE / divisor**2
        scores = torch.linspace(*SCORES, heads, dtype=torch.float64) * math.sqrt(nope + rope) / match
        q_up = torch.zeros(heads, nope + rope, config["q_lora_rank"], dtype=torch.float64)
        k_up = torch.zeros(heads, nope, config["kv_lora_rank"], dtype=torch.float64)
        for head in range(heads):
            basis = self._orthonormal(nope, BLOCK)
            q_up[head, :nope] = scores[head] * basis @ self._asked(OFFSETS[layer], divisor)
            k_up[head, :, :BLOCK] = basis
        q_up[:, nope:, :BLOCK] = self._normal(heads * rope, BLOCK).view(heads, rope, BLOCK) * 1.2 / math.sqrt(BLOCK)

        # Values: A, B0, B1, in a basis that is orthonormal over all heads together, and back out of it.
        read = 3 * BLOCK
        basis = self._orthonormal(heads * value, read)
        v_up = torch.zeros(heads, value, config["kv_lora_rank"], dtype=torch.float64)
        v_up[..., :read] = basis.view(heads, value, read)
        out = torch.zeros(hidden, read, dtype=torch.float64)
        eye = torch.eye(BLOCK, dtype=torch.float64)
        eye[MARK, MARK] = 0.0
        out[FOUND[layer], :BLOCK] = eye * divisor
        if FOUND_BEFORE[layer] is not None:
            out[FOUND_BEFORE[layer], BLOCK : 2 * BLOCK] = eye * divisor
            out[FOUND_BEFORE[layer], 2 * BLOCK :] = self.codes.turn(17) * divisor
        weights = {
            "q_a_proj.weight": q_from,
            "q_a_layernorm.weight": torch.ones(config["q_lora_rank"]),
            "q_b_proj.weight": q_up.flatten(0, 1),
            "kv_a_proj_with_mqa.weight": torch.cat((latent_from, rope_from)),
            "kv_a_layernorm.weight": torch.ones(config["kv_lora_rank"]),
            "kv_b_proj.weight": torch.cat((k_up, v_up), dim=1).flatten(0, 1),
            "o_proj.weight": out @ basis.T,
        }
        if owns_indexer:
            weights |= {f"indexer.{name}": weight for name, weight in self._indexer(layer, divisor).items()}
        return weights

    def _asked(self, offset: int, divisor: float) -> torch.Tensor:
        """[128, q_lora_rank]: the code that a query asks for, and how much it asks for BOS."""
        asked = torch.zeros(BLOCK, self.config["q_lora_rank"], dtype=torch.float64)
        asked[:, :BLOCK] = self.codes.turn(offset)
        asked[MARK, :BLOCK] = 0.0
        # K's mean is CONSTANT / divisor; a code's norm and BOS's mark are sqrt(CODE) / divisor.
        asked[MARK, BLOCK : 2 * BLOCK] = SINK * math.sqrt(CODE) / (CONSTANT * BLOCK)
        return asked

    def _indexer(self, layer: int, divisor: float) -> dict[str, torch.Tensor]:
        """Half of the index heads ask as this layer does, half as the next one, which may share the selection.

        RoPE turns the first half of an index key; the code's lower frequencies and BOS's mark are in the other.
        """
        config = self.config
        heads, dim, rope = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
        kept = torch.cat((torch.arange(dim - rope - 2), torch.tensor([MARK, MARK + 1])))
        wk = torch.zeros(dim, config["hidden_size"], dtype=torch.float64)
        wk[:rope, A] = 0.3 * self._normal(rope, BLOCK) / math.sqrt(BLOCK)
        wk[rope:, A] = torch.eye(BLOCK, dtype=torch.float64)[kept]
        wq = torch.zeros(heads, dim, config["q_lora_rank"], dtype=torch.float64)
        wq[:, :rope, :BLOCK] = 0.3 * self._normal(heads * rope, BLOCK).view(heads, rope, BLOCK) / math.sqrt(BLOCK)
        offsets = (OFFSETS[layer], OFFSETS[(layer + 1) % len(OFFSETS)])
        for head in range(heads):
            wq[head, rope:] = self._asked(offsets[head * 2 // heads], divisor)[kept]
        weigh = torch.zeros(heads, config["hidden_size"], dtype=torch.float64)
        weigh[:, K] = (0.7 + 0.6 * torch.rand(heads, 1, generator=self.generator, dtype=torch.float64)) / BLOCK
        return {
            "wq_b.weight": wq.flatten(0, 1),
            "wk.weight": wk,
            "k_norm.weight": torch.ones(dim),
            "k_norm.bias": torch.zeros(dim),
            "weights_proj.weight": weigh,
        }

    def _normal(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=self.generator, dtype=torch.float64)

    def _orthonormal(self, rows: int, columns: int) -> torch.Tensor:
        return torch.linalg.qr(self._normal(rows, columns))[0]
