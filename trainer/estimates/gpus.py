"""Peak rates of GPUs from their makers' data sheets, for the cost model and for MFU."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The rates and the memory of one kind of GPU, in nodes of eight."""

    flops: float  # operations a second: bfloat16 products with float32 sums, without sparsity
    memory_gib: float  # size of the device's memory, some of which the driver takes
    memory_rate: float  # bytes a second to and from the device's memory
    # Bytes a second in one direction to the other GPUs of the node: half of the data sheet's
    # figure, which adds both directions; over PCIe if there is no NVLink
    link_rate: float
    # Bytes a second to other nodes, with one network card for each GPU, as in the maker's systems
    # of eight
    network_rate: float
    pattern: str  # regular expression for the driver's names of GPUs with these `flops`


GPUS = {
    # resources.nvidia.com/en-us-blackwell-architecture/datasheet (HGX B200); network: DGX B200, 400
    # Gbit/s a GPU.
    "b200": Gpu(2250e12, 179.0, 8.0e12, 900e9, 50e9, r"\bB200\b"),
    # resources.nvidia.com/en-us-data-center-overview/hpc-datasheet-sc23-h200 (SXM); network: DGX
    # H200.
    "h200": Gpu(989.4e12, 140.0, 4.8e12, 450e9, 50e9, r"\bH200(?! NVL)\b"),
    # resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (SXM5); network: DGX
    # H100.
    "h100": Gpu(989.4e12, 79.6, 3.35e12, 450e9, 50e9, r"\bH100(?! (PCIe|NVL|MIG))\b"),
    # nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet (SXM4, 80
    # GB), and DGX A100's.
    "a100": Gpu(312e12, 79.3, 2.039e12, 300e9, 25e9, r"\bA100\b"),
    # resources.nvidia.com/en-us-l40s/l40s-datasheet-28413; PCIe 4.0 x16; network: one 200 Gbit/s
    # card for two GPUs.
    "l40s": Gpu(362e12, 44.5, 0.864e12, 32e9, 12.5e9, r"\bL40S\b"),
    # images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf, appendix A;
    # one machine.
    "rtx4090": Gpu(165.2e12, 23.5, 1.008e12, 32e9, 12.5e9, r"\bRTX 4090\b(?! (D|Laptop))"),
}


def peak_flops(device_name: str) -> float | None:
    """Return the peak rate of bfloat16 operations, per second, of the device with this driver's
    name; None if unknown.
    """
    rates = (
        gpu.flops
        for gpu in GPUS.values()
        if re.search(gpu.pattern, device_name) and "MIG" not in device_name
    )
    return next(rates, None)
