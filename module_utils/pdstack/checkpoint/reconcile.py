"""Make the disk hold a checkpoint: observe, plan, fetch, check, publish. The door for all callers."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Callable, Dict, Iterator, List, Optional, Sequence

from . import links, listing as listings, manifest as manifests, plan as plans, repairs, retire, sanity, scrub
from .errors import CheckpointError, SourceError
from .fetch import Clock, Fetcher, FetchOptions, disk_error
from .listing import Listing, RepoFile
from .manifest import Entry, Manifest
from .peers import Swarm
from .progress import Progress
from .request import VERIFY, Request, Result, check_addresses, check_files, open_sources
from .sources import HubSource, Source, patiently
from .store import (
    Store,
    load_manifest,
    lstat,
    make_parents,
    require_space,
    save_manifest,
    sync_directory,
    tree,
)
from .transport import Transport

SAVE_EVERY = 2.0  # seconds between manifests while files arrive
SAMPLE = 8  # verify=sample hashes one file of so many


@dataclass
class World:
    """The machine, as tests may replace it."""

    transport: Optional[Transport] = None
    clock: Clock = field(default_factory=lambda: time)  # the module has the three functions
    rng: Callable[[], float] = random.random
    write: Callable[[int, memoryview, int], int] = os.pwrite
    swarm: Optional[Swarm] = None


class Reconciler:
    """One checkpoint on one host. Every public method returns a Result or raises CheckpointError."""

    def __init__(self, request: Request, world: Optional[World] = None) -> None:
        self._request = request
        self._world = world or World()
        self._check_request()
        self.store = Store(request.root, listings.directory_name(request.repo, request.commit))
        self._progress = Progress(None, self._world.clock.time)
        self._lock = threading.Lock()
        self._result = Result(repo=request.repo, commit=request.commit, directory=self.store.final)
        self._sources: Optional[List[Source]] = None

    def _check_request(self) -> None:
        request = self._request
        if request.verify not in VERIFY:
            raise CheckpointError("bad-input", f"verify {request.verify!r}", f"one of {', '.join(VERIFY)}")
        if not 1 <= request.workers <= 64:
            raise CheckpointError("bad-input", f"workers {request.workers}", "1 to 64")
        if not os.path.isabs(request.root) or request.root != os.path.normpath(request.root):
            raise CheckpointError("bad-input", f"dest {request.root!r}", "an absolute, normal path")
        check_addresses(request)

    # -- the four states ---------------------------------------------------------------------

    def intact(self) -> Optional[Result]:
        """Return the result of a run that has nothing to do, None where there is something to do."""
        started = self._world.clock.monotonic()
        manifest = self._manifest()
        if manifest is not None and self.store.base == self.store.final and manifest.listing == self._listing():
            selected = self._select(manifest.listing)
            plan = self._observe(selected, self._rehash())
            whole = not plan.strays and all(step.action == plans.KEEP for step in plan.steps)
            if whole and not repairs.is_open(self.store):
                self._refuse(sanity.unexpected(self.store.final, self._expectations()))
                return self._finish(selected, plan, started)
        return None

    def present(self, check: bool = False) -> Result:
        """Make the published directory complete and right; with ``check`` say what that would take."""
        started = self._world.clock.monotonic()
        intact = self.intact()
        if intact is not None:
            manifest = self._manifest()
            if manifest is not None:
                self._offer(self._select(manifest.listing), manifest.files)
            return intact
        if check:
            self._would(self._listing())
            self._result.seconds = self._world.clock.monotonic() - started
            return self._result
        with self._locked("present"):
            self._progress = Progress(self.store.status, self._world.clock.time)
            try:
                self._make(started)
            except BaseException as error:
                failure = disk_error(error) if isinstance(error, OSError) else error
                self._progress.finish(str(failure) or type(failure).__name__)
                raise
            self._progress.finish()
        return self._result

    def verified(self) -> Result:
        """Hash what ``verify`` asks for and change nothing. Raises CheckpointError naming what is broken."""
        started = self._world.clock.monotonic()
        manifest = manifests.require(load_manifest(self.store.final), self.store.final)
        selected = self._select(manifest.listing)
        plan = self._observe(selected, self._rehash())
        entries = self._hash(self.store.final, [step.file for step in plan.of(plans.HASH)])
        broken = [f"{step.file.path}: {step.reason}" for step in plan.of(plans.FETCH)]
        broken += [f"{s.file.path}: wrong bytes" for s in plan.of(plans.HASH) if s.file.path not in entries]
        broken += [f"{path}: not part of the checkpoint" for path in plan.strays]
        if not broken:
            broken = sanity.check(self.store.final, self._expectations())
        if broken:
            raise CheckpointError(
                "not-verified", "; ".join(broken[:20]), "the bytes of the listing", "run with state=present to repair"
            )
        self._result.verified = sorted(entries)
        return self._finish(selected, plan, started, entries)

    def status(self) -> Result:
        """Say what is there by stat alone; never fails for what it finds."""
        started = self._world.clock.monotonic()
        manifest = self._manifest()
        if manifest is None:
            self._result.problems = ["not placed"]
            return self._result
        selected = self._select(manifest.listing)
        plan = self._observe(selected, lambda file: False)
        published = self.store.base == self.store.final
        self._result.problems = ([] if published else ["incomplete: not published"]) + [
            f"{step.file.path}: {step.reason}" for step in plan.steps if step.action != plans.KEEP
        ]
        self._result.problems += [f"{path}: not part of the checkpoint" for path in plan.strays]
        return self._finish(selected, plan, started)

    def absent(self, check: bool = False) -> Result:
        """Remove what was placed and nothing else; a directory with files of others stays, and is named."""
        started = self._world.clock.monotonic()
        result, retirement = self._result, retire.plan(self.store)
        if retirement.foreign is not None:
            result.problems.append(f"{retirement.foreign} was not placed by pd_checkpoint and stays")
        result.changed, result.before = retirement.needed, retirement.before
        if retirement.needed and not check:
            with self._locked("absent"):
                stay = retire.carry_out(self.store, retirement)
            result.problems += [f"{path} is not ours and stays" for path in stay]
        result.seconds = self._world.clock.monotonic() - started
        return result

    # -- observing ---------------------------------------------------------------------------

    def _manifest(self) -> Optional[Manifest]:
        """Return the manifest where the files are now, None for one of another repository or commit."""
        found = load_manifest(self.store.base)
        if found is None or (found.listing.repo, found.listing.commit) != (self._request.repo, self._request.commit):
            return None
        return found

    def _select(self, listing: Listing) -> Listing:
        return listings.select(listing, self._request.include, self._request.exclude)

    def _observe(self, selected: Listing, rehash: Callable[[RepoFile], bool]) -> plans.Plan:
        base = self.store.base
        corrupt = scrub.findings(self.store) if base == self.store.final else {}
        return plans.decide(
            selected,
            self._manifest(),
            lambda path: lstat(os.path.join(base, path)),
            tree(base),
            corrupt,
            rehash,
        )

    def _rehash(self) -> Callable[[RepoFile], bool]:
        if self._request.verify == "full":
            return lambda file: True
        if self._request.verify == "sample":
            return lambda file: self._world.rng() < 1 / SAMPLE
        return lambda file: False

    def _hash(self, base: str, files: Sequence[RepoFile]) -> Dict[str, Entry]:
        """Hash files in parallel; return the entries of those that are right."""
        now = self._world.clock.time

        def one(file: RepoFile) -> Optional[Entry]:
            entry = manifests.verify_file(os.path.join(base, file.path), file, now())
            self._progress.add(file.size)
            self._progress.file_done()
            return entry

        if not files:
            return {}
        self._progress.enter("hashing", len(files), sum(file.size for file in files))
        # Some wait for the disk while others hash, so more than the cores where these are few.
        with ThreadPoolExecutor(min(len(files), max(self._request.workers, os.cpu_count() or 1))) as pool:
            found = list(pool.map(one, files))
        return {file.path: entry for file, entry in zip(files, found) if entry is not None}

    # -- making ------------------------------------------------------------------------------

    def _would(self, listing: Listing) -> None:
        selected = self._select(listing)
        plan = self._observe(selected, self._rehash())
        entries = self._hash(self.store.base, [step.file for step in plan.of(plans.HASH)])
        bad = plan.of(plans.FETCH) + [step for step in plan.of(plans.HASH) if step.file.path not in entries]
        have = self._elsewhere([step.file for step in bad])
        for step in bad:
            (self._result.linked if step.file.sha256 in have else self._result.fetched).append(step.file.path)
        self._result.verified = sorted(entries)
        self._result.to_fetch_bytes = self._to_fetch([s.file for s in bad if s.file.sha256 not in have])
        self._result.quarantined = list(plan.strays)
        self._result.changed = bool(bad or plan.strays) or self.store.base != self.store.final
        self._describe(selected, plan, entries)
        require_space(self.store.root, self._result.to_fetch_bytes, self._request.min_free, self.store.name)

    def _make(self, started: float) -> None:
        listing = self._listing()
        selected = self._select(listing)
        store = self.store
        store.prepare()
        published = store.base == store.final
        if not published:
            os.makedirs(store.staging, mode=0o755, exist_ok=True)
        base = store.base
        plan = self._observe(selected, self._rehash())
        found = self._manifest()
        known = {} if found is None else found.files
        keep = {step.file.path: known[step.file.path] for step in plan.of(plans.KEEP)}
        if found is None:
            save_manifest(self.store.work, base, Manifest(listing))  # from here on it can be retired
        hashed = self._hash(base, [step.file for step in plan.of(plans.HASH)])
        current = save_manifest(self.store.work, base, Manifest(listing, {**keep, **hashed}))
        self._result.verified = sorted(hashed)
        bad = [step.file for step in plan.of(plans.FETCH)]
        bad += [step.file for step in plan.of(plans.HASH) if step.file.path not in hashed]
        entries = dict(current.files)
        if published and bad:
            since = min(scrub.proven(file.path, known, store) for file in bad)
            repairs.begin(store, since, sorted(file.path for file in bad))
            self._result.suspect_since = _utc(since)
        todo = self._link(base, bad, entries)
        self._offer(selected, entries)
        self._describe(selected, plan, hashed)
        self._set_aside(base, plan.strays)
        self._fetch(base, listing, todo, entries)
        self._progress.enter("checking")
        save_manifest(self.store.work, base, Manifest(listing, entries))
        self._refuse(sanity.check(base, self._expectations()))
        if not published:
            self._publish()
        repairs.end(store, self._world.clock.time())
        repaired = sorted(file.path for file in bad) if published else []
        self._result.repaired = repaired
        self._result.changed = not published or bool(bad or self._result.quarantined)
        self._finish(selected, plan, started, entries)

    def _offer(self, selected: Listing, entries: Dict[str, Entry]) -> None:
        """Let the other hosts of a run have what is proven here; it may be published while they read."""
        swarm = self._world.swarm
        if swarm is None:
            return
        swarm.share(selected.files)
        bases = (self.store.final, self.store.staging)
        here = [file for file in selected.files if file.path in entries]
        swarm.offer({file.key: [os.path.join(base, file.path) for base in bases] for file in here})

    def _fetch(self, base: str, listing: Listing, todo: List[RepoFile], entries: Dict[str, Entry]) -> None:
        groups: Dict[str, List[RepoFile]] = {}
        for file in todo:
            groups.setdefault(file.key, []).append(file)
        first = [group[0] for group in groups.values()]
        require_space(self.store.root, self._to_fetch(first), self._request.min_free, self.store.name)
        self._progress.enter("fetching", len(first), sum(file.size for file in first))
        request, swarm = self._request, self._world.swarm
        workers = request.workers if swarm is None else swarm.workers(request.workers)
        options = FetchOptions(
            workers=workers, attempts=request.attempts, min_rate=request.min_rate, stall=request.stall
        )
        sources = self._open_sources() if first else []
        fetcher = Fetcher(
            sources if swarm is None else [*sources, *swarm.peers],
            self.store.partials,
            options,
            self._progress,
            self._world.clock,
            self._world.rng,
            self._world.write,
            swarm,
        )

        saved = [0.0]

        def place(file: RepoFile, partial: str, sha256: str) -> None:
            with self._lock:
                for twin in groups[file.key][1:]:
                    copy = f"{partial}.twin"
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(copy)
                    os.link(partial, copy)
                    self._move_in(base, copy, twin.path)
                self._move_in(base, partial, file.path)
                now = self._world.clock.time()
                for twin in groups[file.key]:
                    stat = os.lstat(os.path.join(base, twin.path))
                    entries[twin.path] = manifests.entry_of(stat, sha256, now)
                    self._result.fetched.append(twin.path)
                # What a kill takes from the manifest is hashed again, not fetched again.
                if self._world.clock.monotonic() - saved[0] > SAVE_EVERY:
                    save_manifest(self.store.work, base, Manifest(listing, entries))
                    saved[0] = self._world.clock.monotonic()
            self._offer(Listing(listing.repo, listing.commit, groups[file.key]), entries)

        try:
            fetcher.fetch_all(first, place)
        finally:
            shutil.rmtree(self.store.scratch, ignore_errors=True)
            if first:
                save_manifest(self.store.work, base, Manifest(listing, entries))
            self._result.fetched.sort()
            self._result.bytes_by_source = dict(self._progress.by_source)
            self._result.resumed_bytes = self._progress.resumed

    def _move_in(self, base: str, partial: str, path: str) -> None:
        """Give verified bytes their name; what had it before goes only now."""
        target = make_parents(base, path)
        if os.path.isdir(target) and not os.path.islink(target):
            self._set_aside(base, [path])
        os.replace(partial, target)

    def _link(self, base: str, wanted: List[RepoFile], entries: Dict[str, Entry]) -> List[RepoFile]:
        """Hard-link what another revision has intact; return the files that are left to fetch."""
        have = self._elsewhere(wanted)
        left: List[RepoFile] = []
        for file in wanted:
            twin = have.get(file.sha256 or "")
            if twin is None:
                left.append(file)
                continue
            temporary = os.path.join(self.store.partials, f"{file.key}.link")
            before = os.lstat(twin.path)
            try:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)
                os.link(twin.path, temporary)
                self._move_in(base, temporary, file.path)
            except OSError:  # another filesystem, or too many links: then it is fetched
                left.append(file)
                continue
            after = os.lstat(twin.path)
            entries[file.path] = manifests.entry_of(after, twin.entry.sha256, twin.entry.verified)
            links.follow(self.store.others(), before, after)
            self._result.linked.append(file.path)
        return left

    def _elsewhere(self, wanted: Sequence[RepoFile]) -> Dict[str, links.Twin]:
        return links.intact(self.store.others(), {file.sha256 for file in wanted if file.sha256})

    def _set_aside(self, base: str, paths: Sequence[str]) -> None:
        """Move what does not belong out of the engine's sight; nothing is deleted."""
        for path in paths:
            target = os.path.join(self.store.quarantine, f"{path}.{int(self._world.clock.time())}")
            os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
            os.rename(os.path.join(base, path), target)
            self._result.quarantined.append(path)

    def _publish(self) -> None:
        self._progress.enter("publishing")
        for folder, _, _ in os.walk(self.store.staging):
            sync_directory(folder)
        os.rename(self.store.staging, self.store.final)
        sync_directory(self.store.root)

    def _to_fetch(self, files: Sequence[RepoFile]) -> int:
        """Return the bytes still to come: sizes of distinct content less what partials hold."""
        total = 0
        for file in {item.key: item for item in files}.values():
            stat = lstat(os.path.join(self.store.partials, file.key))
            total += file.size - (min(stat.st_size, file.size) if stat is not None else 0)
        return total

    # -- sources -----------------------------------------------------------------------------

    def _open_sources(self) -> List[Source]:
        if self._sources is None:
            check_files(self._request)
            self._sources = open_sources(self._request, self.store.scratch, self._world.transport)
            if not self._sources:
                raise CheckpointError(
                    "bad-input", "no source", "at least one of hub, dir:///path, http(s)://base, rclone:remote:path"
                )
        return self._sources

    def _listing(self) -> Listing:
        """Return the listing: of the request, of the manifest, of the hub, of the first source that has one."""
        request = self._request
        if request.listing is not None:
            return listings.from_document(request.listing, request.repo, request.commit)
        known = self._manifest()
        if known is not None:
            return known.listing
        sources = self._open_sources()
        hubs = [source for source in sources if isinstance(source, HubSource)]
        said: List[str] = []
        for source in hubs[:1] or sources:
            try:
                found = self._ask_for_listing(source)
            except SourceError as error:
                said.append(f"{source.name}: {error}")
                continue
            if found is not None:
                return found
            said.append(f"{source.name}: carries none")
        raise CheckpointError(
            "no-listing",
            f"no listing of {request.repo}@{request.commit[:12]}: " + "; ".join(said),
            f"the hub's tree, or a {listings.LISTING_NAME} in a source",
            "check the network and the token, or make the listing where the hub can be reached",
        )

    def _ask_for_listing(self, source: Source) -> Optional[Listing]:
        request, world = self._request, self._world
        ask = functools.partial(source.listing, request.repo, request.commit)
        return patiently(ask, request.attempts, world.clock.sleep, world.rng)

    # -- the rest ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _locked(self, purpose: str) -> Iterator[None]:
        """Hold the root's lock; what the disk refuses becomes the operator's error."""
        try:
            with self.store.lock(f"pd_checkpoint {purpose} {self.store.name}"):
                yield
        except OSError as error:
            raise disk_error(error) from None

    def _refuse(self, problems: List[str]) -> None:
        """Raise CheckpointError where there are problems of whole bytes."""
        if problems:
            raise CheckpointError(
                "not-sane",
                f"{self._request.repo}@{self._request.commit[:12]}: " + "; ".join(problems[:10]),
                "one whole checkpoint",
                "the bytes are those of the listing: choose another revision, or correct include, exclude, expect",
            )

    def _expectations(self) -> sanity.Expectations:
        return sanity.Expectations(self._request.shards, self._request.expert_dtype)

    def _describe(self, selected: Listing, plan: plans.Plan, hashed: Dict[str, Entry]) -> None:
        """Fill the diff: each path with its digest, or with what is wrong with it."""
        for step in plan.steps:
            good = step.action == plans.KEEP or step.file.path in hashed
            if good:
                self._result.before[step.file.path] = step.file.key
            elif step.reason != "missing":
                reason = step.reason if step.action == plans.FETCH else "wrong bytes"
                self._result.before[step.file.path] = reason
            self._result.after[step.file.path] = step.file.key
        for path in plan.strays:
            self._result.before[path] = "not part of the checkpoint"

    def _finish(
        self, selected: Listing, plan: plans.Plan, started: float, entries: Optional[Dict[str, Entry]] = None
    ) -> Result:
        result = self._result
        result.files, result.bytes = len(selected.files), selected.size
        if not result.after:
            self._describe(selected, plan, entries or {})
        manifest = self._manifest()
        known = {} if manifest is None else manifest.files
        times = scrub.merge({**known, **(entries or {})}, self.store)
        oldest = manifests.oldest_verification(times)
        if oldest is not None:
            result.last_full_verify = _utc(oldest)
        result.seconds = self._world.clock.monotonic() - started
        return result


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))
