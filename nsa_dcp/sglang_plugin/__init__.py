"""The production path: a stock sglang serves DSA models with `--attention-backend nsa --dcp-size N`.

Nothing is imported here. sglang finds `plugin.register` through the entry point group `sglang.srt.plugins`.
"""
