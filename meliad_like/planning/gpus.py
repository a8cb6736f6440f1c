"""The GPUs that a run can be planned for, as XLA's compiler asks for them, from NVIDIA's data sheets."""

from typing import NamedTuple


class Gpu(NamedTuple):
    """The properties in which kinds of GPUs differ."""

    kind: str
    capability: str
    """The compute capability, as a message of protocol buffers."""
    processors: int
    """The number of streaming multiprocessors."""
    units: int
    """The number of float32 units of a multiprocessor."""
    clock: float
    """The clock rate in GHz."""
    l2_cache: int
    """The size of the L2 cache in MiB."""
    shared_memory: int
    """The shared memory of a multiprocessor in KiB; a block can have one less."""
    memory: int
    """The size of the memory in bytes."""
    bandwidth: int
    """The bandwidth of the memory in bytes per second."""

    def target_config(self) -> str:
        """The text of XLA's `GpuTargetConfigProto`."""
        return f"""gpu_device_info {{
            cuda_compute_capability {{ {self.capability} }}
            core_count: {self.processors}
            fpus_per_core: {self.units}
            clock_rate_ghz: {self.clock}
            l2_cache_size: {self.l2_cache << 20}
            shared_memory_per_core: {self.shared_memory << 10}
            shared_memory_per_block: {48 << 10}
            shared_memory_per_block_optin: {self.shared_memory - 1 << 10}
            device_memory_size: {self.memory}
            memory_bandwidth: {self.bandwidth}
            threads_per_warp: 32
            threads_per_block_limit: 1024
            threads_per_core_limit: 2048
            registers_per_block_limit: 65536
            registers_per_core_limit: 65536
            thread_dim_limit_x: 1024
            thread_dim_limit_y: 1024
            thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647
            block_dim_limit_y: 65535
            block_dim_limit_z: 65535
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 }}
        device_description_str: "{self.kind}"
        """


_A100 = Gpu("NVIDIA A100-SXM4-80GB", "major: 8", 108, 64, 1.41, 40, 164, 85_100_068_864, 2_039_000_000_000)
_HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES"
_H100 = Gpu("NVIDIA H100 80GB HBM3", _HOPPER, 132, 128, 1.98, 50, 228, 84_942_979_072, 3_352_000_000_000)
_H200 = _H100._replace(kind="NVIDIA H200", memory=150_000_000_000, bandwidth=4_800_000_000_000)
GPUS = {"a100": _A100, "h100": _H100, "h200": _H200}
