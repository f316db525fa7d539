"""What this package refuses to hand to FlashMLA, in one sentence."""

import pytest
import torch

from nsa_dcp_kernels import _flash_mla


def test_more_heads_than_flash_mla_takes_are_refused():
    assert [_flash_mla.pad_heads(heads) for heads in (1, 64, 65, 128)] == [64, 64, 128, 128]
    with pytest.raises(NotImplementedError, match="1 to 128 heads a rank, got 129"):
        _flash_mla.pad_heads(129)


def test_other_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(RuntimeError, match=r"needs a Hopper GPU .*, found NVIDIA A100 \(8.0\)"):
        _flash_mla.count_sms.__wrapped__(torch.device("cuda", 0))
