"""Objects of a rank for weight syncs and generation, made once all engines of the job take work."""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo.config import GRPOConfig
from grpo.config.models import (
    AdapterSlot,
    EngineModel,
    can_continue,
    choose_backend,
    engine_args,
    sampling_settings,
    without_tokens,
)
from grpo.engine.messages import EngineSpec
from grpo.engine.supervisor import START_PHASE, EngineRestart, EngineSupervisor
from grpo.faults.failure import JobFailed
from grpo.faults.watch import FailureWatch
from grpo.groups.node_groups import NodeGroups
from grpo.place.gpu_needs import nccl_doubt
from grpo.place.startup import StartupClock
from grpo.place.topology import NodeTopology
from grpo.place.wire import Wire
from grpo.record.timeline.recorder import Recorder
from grpo.rollout.ahead import GenerationBatches, Progress
from grpo.rollout.balance import NodeBalance
from grpo.rollout.node import LocalMainSampler, NodeSampler
from grpo.rollout.pool import EnginePool
from grpo.rollout.prompts import Prompts
from grpo.rollout.turns.batch import BatchLimits
from grpo.rollout.turns.broker import TurnBroker
from grpo.rollout.turns.rollouts import Rollouts
from grpo.rollout.turns.serving import RankEpisodes
from grpo.weights.delivery import WeightDelivery
from grpo.weights.engine_args import transfer_args
from grpo.weights.names import some
from grpo.weights.source import GatheredSource
from grpo.weights.sync import WeightSyncer, load_transport
from grpo.weights.trained import TrainedModel
from grpo.weights.wire_format import WireFormat, agreed, ask_engines

_log = logging.getLogger(__name__)


def _backend(args: GRPOConfig, topology: NodeTopology) -> str:
    return choose_backend(args.vllm_sync_backend, has_gpus=bool(topology.devices))


def engine_spec(
    args: GRPOConfig, model: EngineModel, topology: NodeTopology, adapters: AdapterSlot | None = None
) -> EngineSpec:
    """Spec of the node's engines. Logs a warning if an engine's death may take the trainer down."""
    backend = _backend(args, topology)
    if backend == "nccl" and (doubt := nccl_doubt(os.environ)):
        _log.warning("WARNING: %s: %s", *doubt)
    return EngineSpec(
        engine_args=engine_args(args, model, topology, adapters) | transfer_args(backend),
        sampling=without_tokens(sampling_settings(args), model.never_sampled),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _EngineFacts(Wire):
    """A local main's information about its engines, once they take work."""

    startup_s: float
    """Startup time of the slowest engine."""
    max_model_len: int
    wire_format: WireFormat
    turns_address: str | None = None
    """Address of the node's turn broker, if there are multi-turn rollouts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Serving:
    """Objects of a rank once all engines of the job take work."""

    batches: GenerationBatches
    delivery: WeightDelivery
    pool: EnginePool | None
    """Pool of the node's engines, on the local main only."""
    multi_turn: RankEpisodes | None
    """Episodes of this rank, for multi-turn rollouts only."""

    def wait(self) -> None:
        """Wait for asynchronous generation: all batches under way. Collective over the job."""
        self.batches.wait()
        if self.multi_turn is not None:
            self.multi_turn.wait()

    def drop(self) -> None:
        """Drop the batches of asynchronous generation. On every rank, but not collective."""
        self.batches.drop()
        if self.multi_turn is not None:
            self.multi_turn.drop()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingStart:
    """Inputs of a rank before the job's engines take work."""

    args: GRPOConfig
    engines: EngineSupervisor
    trained: TrainedModel
    groups: NodeGroups
    watch: FailureWatch
    timeline: Recorder
    startup: StartupClock
    rollouts: Rollouts | None
    progress: Callable[[], Progress]
    prompts_of_batch: Callable[[int], list[list[int]] | None]
    """See `GenerationBatches`."""
    revive: Callable[[], None]
    """Brings new engines, with weights, to nodes without any; collective over the job."""
    on_restart: Callable[[EngineRestart], None]

    def wait(self) -> Serving:
        """Wait for the job's engines, and connect to them. Collective."""
        args, clients = self.args, self.engines.clients
        source = self.trained.source(args)
        pool, broker, facts, failure = None, None, None, None
        with self.watch.during(START_PHASE), self.startup.waiting():
            try:
                _log.info("the model is loaded; waiting for the engines to start")
                if clients:
                    pool, broker, facts = self._meet_engines(source)
            except JobFailed:
                raise  # the job has its record already
            except RuntimeError as error:  # `EngineError` is a RuntimeError
                failure = self.watch.make_record(error)
            of_ranks = self.groups.exchange(self.watch, failure, facts, _EngineFacts | None)
        of_nodes = [each for each in of_ranks if each is not None]
        self.engines.supervise()
        self.startup.engine_s = max(each.startup_s for each in of_nodes)
        _log.info("all engines take work; the first weight sync brings them the weights")
        wire_format = agreed([each.wire_format for each in of_nodes])
        source.adopt(wire_format)
        if wire_format.unplaced:
            _log.info("the engines have no place for %s, and sample without", some([*wire_format.unplaced]))
        user_seed = (args.generation_kwargs or {}).get("seed")
        verifier = self.trained.verifier(
            args,
            clients,
            min(each.max_model_len for each in of_nodes),
            num_shards=self.engines.topology.tensor_parallel_size,
            on_gpus=bool(self.engines.topology.devices),
            largest=lambda mine: max(self._of_all(mine)),
        )
        batches = GenerationBatches(
            self._make_sampler(pool),
            seed=args.seed,
            user_seed=user_seed,
            progress=self.progress,
            lookahead=args.generation_lookahead,
            prompts_of=self._prompts_of,
            any_rank=lambda mine: bool(self.groups.largest(int(mine))),
            in_flight=args.generation_lookahead > 1 and not self.trained.adapters_travel,
            continues=can_continue(args),
        )
        syncer = WeightSyncer(
            source,
            clients,
            backend=_backend(self.args, self.engines.topology),
            tensor_parallel_size=self.engines.topology.tensor_parallel_size,
            timeout_s=args.vllm_sync_timeout,
            on_trouble=self.watch.fail,
            timeline=self.timeline,
            in_flight=args.generation_lookahead > 1,
            on_paused=(lambda version, of_engines: None) if pool is None else pool.note_paused,
            adapters_in_use=set if pool is None else pool.adapters_in_use,
        )
        self.engines.before_restart = syncer.abort
        return Serving(
            batches=batches,
            multi_turn=self._rank_episodes(batches, pool, broker, of_nodes),
            delivery=WeightDelivery(
                self.engines,
                syncer,
                verifier,
                self.groups,
                self.watch,
                wire_format=wire_format,
                timeout_s=args.vllm_sync_timeout,
                on_restart=self.on_restart,
                trial=self.trained.trial(verifier, lambda mine: min(self._of_all(mine))),
            ),
            pool=pool,
        )

    def _of_all(self, mine: float) -> list[float]:
        """Gather a number of each rank. Collective."""
        return self.groups.exchange(self.watch, None, mine, float)

    def _rank_episodes(
        self,
        batches: GenerationBatches,
        pool: EnginePool | None,
        broker: TurnBroker | None,
        of_nodes: Sequence[_EngineFacts],
    ) -> RankEpisodes | None:
        if self.rollouts is None:
            return None
        return RankEpisodes(
            self.rollouts,
            self.groups,
            self.watch,
            batches,
            BatchLimits(batch_s=self.args.rollout_timeout, turn_s=self.args.vllm_generate_timeout),
            lookahead=self.args.generation_lookahead,
            pool=pool,
            broker=broker,
            address=of_nodes[self.engines.topology.node].turns_address,
            max_model_len=min(each.max_model_len for each in of_nodes),
            revive=self.revive,
        )

    def _prompts_of(self, number: int) -> Prompts | None:
        prompts = self.prompts_of_batch(number)
        return None if prompts is None else Prompts.of(prompts)

    def _make_sampler(self, pool: EnginePool | None) -> NodeSampler:
        if pool is None:
            return NodeSampler(self.groups, self.watch, revive=self.revive)
        return LocalMainSampler(
            self.groups,
            self.watch,
            pool,
            revive=self.revive,
            timeout_s=self.args.vllm_generate_timeout,
            balance=self._balance(),
            overlaps=self.args.generation_lookahead > 1,
        )

    def _balance(self) -> NodeBalance | None:
        args, place = self.args, self.engines.topology
        moves = args.balances_nodes or (args.vllm_balance_nodes is None and place.engines_differ)
        if not moves or place.num_nodes == 1:
            return None
        return NodeBalance(self.groups, place.engines_by_node, by_speed=args.balances_nodes)

    def _meet_engines(self, source: GatheredSource) -> tuple[EnginePool, TurnBroker | None, _EngineFacts]:
        clients = self.engines.clients
        load_transport(_backend(self.args, self.engines.topology))
        ready = self.engines.wait_ready()
        max_model_len = min(each.max_model_len for each in ready)
        pool = EnginePool(
            clients,
            max_num_seqs=[each.max_num_seqs for each in ready],
            max_tokens=self.args.max_completion_length,
            max_model_len=max_model_len,
            end_tokens=self.trained.sampled_ends,
            in_flight=self.args.generation_lookahead > 1,
            num_spare=int(self.args.generation_lookahead > 1),  # for a verification, for which ranks wait
            node=self.engines.topology.node,
            timeline=self.timeline,
        )
        broker = None
        if self.rollouts is not None:
            broker = TurnBroker(pool, self.watch, num_others=self.engines.topology.local_world_size - 1)
        facts = _EngineFacts(
            startup_s=max(each.startup_s for each in ready),
            max_model_len=max_model_len,
            wire_format=ask_engines(clients, source.question, self.args.vllm_sync_timeout),
            turns_address=None if broker is None else broker.address,
        )
        return pool, broker, facts
