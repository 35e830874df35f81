"""`hotbunk serve`: answer OpenAI clients with a model."""

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from generation.engine.engine import Leader
from generation.engine.settings import EngineSettings
from generation.images import ImageLimits, ImageProcessor, ImageRules
from generation.loopback import is_loopback
from generation.server import OpenAIServer, ServerSettings
from trainer.commands.generate import add_model_arguments, engine_settings
from trainer.config.model_file import is_multimodal, model_config
from trainer.config.schema import ModelConfig
from trainer.data import load_tokenizer
from trainer.engines import end_token_ids, on_checkpoint
from trainer.errors import UserError
from trainer.run import processes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOOK_SECONDS = 0.5  # how often the engine's health is looked at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command line takes."""
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: 8000)")
    parser.add_argument("--api-key", default=os.environ.get("HOTBUNK_API_KEY"), help="default: $HOTBUNK_API_KEY")
    name = "what clients call the model (default: its folder's name, or its name on the hub)"
    parser.add_argument("--name", help=name)
    parser.add_argument("--concurrent", type=int, default=8, help="answers at a time (default: 8)")
    parser.add_argument("--tool-parser", default="hermes", help="form of tool calls, by vLLM's name (default: hermes)")
    parser.add_argument("--reasoning-parser", help="form of thoughts, by vLLM's name")
    parser.add_argument("--images", type=int, default=8, help="most in a request, where the model sees (default: 8)")
    parser.add_argument("--fetch-images", action="store_true", help="fetch those at public addresses, too")


def main(arguments: argparse.Namespace) -> int:
    """Run the command. Raises UserError before anything is started; then ends the process itself, whatever comes."""
    if arguments.concurrent < 1 or not 0 <= arguments.port < 65536:
        raise UserError("--concurrent must be at least 1, and --port from 0 to 65535")
    if arguments.images < 1:
        raise UserError("--images must be at least 1")
    if not arguments.api_key and not is_loopback(arguments.host):
        where = f"--host {arguments.host[:80]} lets other machines ask"
        raise UserError(f"{where}: give an --api-key, set HOTBUNK_API_KEY, or listen on 127.0.0.1")
    settings, folder = engine_settings(arguments.model, arguments.step), Path(arguments.model)
    tokenizer = load_tokenizer(ModelConfig(path=settings.model))
    server = ServerSettings(
        model_name=arguments.name or (folder.resolve().name if folder.is_dir() else arguments.model),
        host=arguments.host,
        port=arguments.port,
        api_key=arguments.api_key or None,
        eos_token_ids=tuple(end_token_ids(settings.model, tokenizer)),
        tool_parser=arguments.tool_parser,
        reasoning_parser=arguments.reasoning_parser,
        image_rules=_image_rules(settings.model, tokenizer, arguments),
    )
    cache = settings.kv_cache_bytes and settings.kv_cache_bytes * arguments.concurrent
    figures = settings.extra | {"disable_log_stats": False, "served_model_name": server.model_name}  # for /metrics
    images = server.image_rules.most if server.image_rules is not None else 0
    several = replace(settings, max_num_seqs=arguments.concurrent, kv_cache_bytes=cache, images=images, extra=figures)
    processes.start_guardian()
    processes.run(lambda: serve(several, server))


def _image_rules(model: str, tokenizer: "PreTrainedTokenizerBase", arguments: argparse.Namespace) -> ImageRules | None:
    model_config(model)  # fetched, where it is on the hub
    if not is_multimodal(model):
        return None
    try:
        processor = ImageProcessor(model, tokenizer)
    except Exception as error:  # Transformers reads the user's files as they come
        raise UserError(f"{model} has no processor for images: {' '.join(str(error).split())[:300]}") from error
    return ImageRules(processor, ImageLimits(larger="resize"), arguments.images, fetch=arguments.fetch_images)


def serve(settings: EngineSettings, server_settings: ServerSettings) -> int:
    """Answer requests until a signal comes, or the engine dies."""

    def job(leader: Leader) -> int:
        server = leader.thread.run(OpenAIServer.start(leader.engine, server_settings), 120, "starting the server")
        print(f"{server_settings.model_name} answers at {server.base_url}", flush=True)
        while not leader.engine.llm.errored:
            time.sleep(_LOOK_SECONDS)
        print("hotbunk: the engine has died", file=sys.stderr)
        return 1

    return on_checkpoint("serve", settings, job)
