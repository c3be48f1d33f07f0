use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicU32, AtomicUsize};

use super::*;

/// Runs `test` on its own thread, because a team binds the thread that makes it.
fn on_a_thread(test: impl FnOnce() + Send + 'static) {
    if let Err(payload) = thread::spawn(test).join() {
        resume_unwind(payload);
    }
}

/// A logical CPU this process may run on, `count` times at most as often as there are.
fn cpus(count: usize) -> Vec<u32> {
    let topology = Topology::new().unwrap();
    let all: Vec<u32> =
        topology.cpuset().iter_set().map(|index| usize::from(index) as u32).collect();
    all.iter().copied().cycle().take(count).collect()
}

fn sums_are_right(team: &Team, runs: u32) {
    for run in 0..runs {
        let seats: Vec<AtomicU32> = (0..team.members()).map(|_| AtomicU32::new(0)).collect();
        team.run(|member| {
            seats[member].fetch_add(run + 1, Ordering::Relaxed);
        });
        assert!(seats.iter().all(|seat| seat.load(Ordering::Relaxed) == run + 1));
    }
}

#[test]
fn every_member_works_once_in_every_run() {
    on_a_thread(|| {
        for members in [1, 2, 5] {
            let team = Team::new(&cpus(members)).unwrap();
            assert_eq!(team.members(), members);
            sums_are_right(&team, 500);
        }
    });
}

#[test]
fn parked_workers_wake_up() {
    on_a_thread(|| {
        let team = Team::new(&cpus(3)).unwrap();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(2));
            sums_are_right(&team, 2);
        }
    });
}

#[test]
fn two_teams_share_cpus_without_starving() {
    let teams: Vec<_> = (0..2)
        .map(|_| {
            thread::spawn(|| {
                let team = Team::new(&cpus(2)).unwrap();
                sums_are_right(&team, 2000);
            })
        })
        .collect();
    teams.into_iter().for_each(|team| team.join().unwrap());
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_lives_on() {
    on_a_thread(|| {
        let team = Team::new(&cpus(3)).unwrap();
        for culprit in 0..3 {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                // All wait for the culprit's chunk.
                let phase = team.phase(1, 1);
                team.run(|member| {
                    let mut turn = phase.begin();
                    if member == culprit {
                        turn.claim();
                        panic!("member {member} fails");
                    }
                    turn.finish();
                });
            }));
            let payload = caught.unwrap_err();
            let message = payload.downcast_ref::<String>().unwrap();
            assert_eq!(*message, format!("member {culprit} fails"));
            sums_are_right(&team, 10);
        }
    });
}

#[test]
fn a_panic_of_one_of_those_that_came_reaches_the_caller() {
    on_a_thread(|| {
        let team = Team::new(&cpus(3)).unwrap();
        for _ in 0..50 {
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                let chunks = Chunks::new(8, 1);
                team.work_off(|_| {
                    while let Some(chunk) = chunks.claim() {
                        assert!(chunk.start != 5, "chunk 5 fails");
                    }
                });
            }));
            assert_eq!(*outcome.unwrap_err().downcast_ref::<&str>().unwrap(), "chunk 5 fails");
        }
        sums_are_right(&team, 10);
    });
}

/// Runs of two phases and a rest, each of which reads what all chunks before it have written.
fn phases_follow_each_other(team: &Team, runs: usize) {
    for run in 1..=runs {
        let chunks = 1 + run % 9;
        let values = || -> Vec<AtomicUsize> { (0..chunks).map(|_| AtomicUsize::new(0)).collect() };
        let sum = |values: &[AtomicUsize]| -> usize {
            values.iter().map(|value| value.load(Ordering::Relaxed)).sum()
        };
        let (first, second, third) = (values(), values(), values());
        let phases = [team.phase(chunks, 1), team.phase(chunks, 2)];
        let rest = Chunks::new(chunks, 1);
        team.work_off(|_| {
            let mut turn = phases[0].begin();
            while let Some(chunk) = turn.claim() {
                first[chunk.start].store(run, Ordering::Relaxed);
            }
            turn.finish();
            let mut turn = phases[1].begin();
            while let Some(range) = turn.claim() {
                range.for_each(|i| second[i].store(sum(&first), Ordering::Relaxed));
            }
            turn.finish();
            while let Some(chunk) = rest.claim() {
                third[chunk.start].store(sum(&second), Ordering::Relaxed);
            }
        });
        assert_eq!(sum(&third), chunks * chunks * chunks * run);
    }
}

#[test]
fn phases_follow_each_other_for_any_number_of_members() {
    on_a_thread(|| {
        for members in [1, 2, 3] {
            phases_follow_each_other(&Team::new(&cpus(members)).unwrap(), 2000);
        }
    });
}

#[test]
fn phases_follow_each_other_though_most_members_are_late() {
    on_a_thread(|| {
        let most = 8 * thread::available_parallelism().unwrap().get();
        let team = Team::new(&cpus(most)).unwrap();
        phases_follow_each_other(&team, 2000);
        // A run for all finds those, too, that stay away.
        sums_are_right(&team, 3);
        phases_follow_each_other(&team, 200);
    });
}

/// A thread that takes what it gets of one CPU until this is dropped.
struct Busy {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Busy {
    fn on(cpu: u32) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let (told, (report, begun)) = (Arc::clone(&is_over), mpsc::channel());
        let thread = thread::spawn(move || {
            bind(&Topology::new().unwrap(), &[cpu]).unwrap();
            report.send(()).unwrap();
            while !told.load(Ordering::Relaxed) {
                spin_loop();
            }
        });
        begun.recv().unwrap();
        Self { is_over, thread: Some(thread) }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Some runs like those of a decode step: two phases and shares, some 50 µs for one thread.
fn work_like_decode(team: &Team) {
    let work = |tasks: usize| {
        black_box((0..tasks * 1000).fold(1_u64, |sum, i| black_box(sum ^ i as u64)));
    };
    for _ in 0..200 {
        let (phase, shares) = (team.phase(8, 1), team.shares(48));
        team.work_off(|member| {
            let mut turn = phase.begin();
            while let Some(chunk) = turn.claim() {
                work(chunk.len());
            }
            turn.finish();
            while shares.claim(member).is_some() {
                work(1);
            }
        });
    }
}

/// Up to four CPUs, if there are several, and threads can see that they wait for one.
#[expect(clippy::print_stderr, reason = "a test says why it checks less")]
fn several_cpus() -> Option<Vec<u32>> {
    let count = thread::available_parallelism().unwrap().get().min(4);
    if count < 2 {
        eprintln!("skipped: this machine has one CPU");
        return None;
    }
    if Delays::of_this_thread().is_none() {
        eprintln!("skipped: this system does not count how long threads wait for a CPU");
        return None;
    }
    Some(cpus(count))
}

#[test]
fn a_busy_cpu_costs_the_team_its_member_and_no_more() {
    let Some(cpus) = several_cpus() else { return };
    let (few, busy) = (cpus[..cpus.len() - 1].to_vec(), cpus[cpus.len() - 1]);
    on_a_thread(move || {
        let _busy = Busy::on(busy);
        // What the caller itself waits for its CPU, because of other tests, is none of the team's.
        let time = |cpus: &[u32]| {
            let cpus = cpus.to_vec();
            let timed = thread::spawn(move || {
                let team = Team::new(&cpus).unwrap();
                let mut delays = Delays::of_this_thread().unwrap();
                work_like_decode(&team);
                delays.take();
                let start = Instant::now();
                (0..10).for_each(|_| work_like_decode(&team));
                start.elapsed().saturating_sub(delays.take())
            });
            timed.join().unwrap()
        };
        let mut ratios: Vec<f64> =
            (0..7).map(|_| time(&cpus).as_secs_f64() / time(&few).as_secs_f64()).collect();
        ratios.sort_by(f64::total_cmp);
        assert!(ratios[3] < 1.0 / 0.8, "with and without a member on a busy CPU: {ratios:.2?}");
    });
}

#[test]
fn a_caller_leaves_a_busy_cpu() {
    let Some(cpus) = several_cpus() else { return };
    on_a_thread(move || {
        let team = Team::new(&cpus).unwrap();
        let _busy = Busy::on(cpus[0]);
        let start = Instant::now();
        while team.places.lock().unwrap().cpus[0] == cpus[0] {
            work_like_decode(&team);
            assert!(start.elapsed() < Duration::from_secs(20), "the caller stays where it was");
        }
        let topology = Topology::new().unwrap();
        let bound = topology.cpu_binding(CpuBindingFlags::THREAD).unwrap();
        let own = team.places.lock().unwrap().cpus[0];
        assert_eq!(bound, set_of(&topology, &[own]).unwrap());
    });
}

#[test]
fn chunks_cover_everything_once() {
    on_a_thread(|| {
        let team = Team::new(&cpus(2)).unwrap();
        for (count, grain) in [(0, 4), (1, 4), (1000, 1), (1000, 7), (64, 64)] {
            let hits: Vec<AtomicU32> = (0..count).map(|_| AtomicU32::new(0)).collect();
            team.for_each_chunk(count, grain, |range| {
                assert!(range.len() <= grain && range.start.is_multiple_of(grain));
                range.for_each(|i| {
                    hits[i].fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(hits.iter().all(|hit| hit.load(Ordering::Relaxed) == 1));
        }
    });
}

#[test]
fn splits_meet_and_cut_at_grains() {
    on_a_thread(|| {
        let team = Team::new(&cpus(3)).unwrap();
        for (count, grain) in [(0, 8), (5, 8), (100, 8), (96, 32), (7, 1)] {
            let mut end = 0;
            for member in 0..3 {
                let range = team.split(member, count, grain);
                assert_eq!(range.start, end);
                assert!(range.start.is_multiple_of(grain) || range.start == count);
                end = range.end;
            }
            assert_eq!(end, count);
        }
    });
}

#[test]
fn a_run_inside_a_run_is_refused() {
    on_a_thread(|| {
        let team = Team::new(&cpus(1)).unwrap();
        let nested = catch_unwind(AssertUnwindSafe(|| team.run(|_| team.run(|_| {}))));
        assert!(nested.is_err());
        sums_are_right(&team, 2);
    });
}

#[test]
fn a_cpu_that_does_not_exist_is_named() {
    on_a_thread(|| {
        let message = format!("{:#}", Team::new(&[99_999]).err().unwrap());
        assert!(message.contains("cpu 99999"), "{message}");
        assert!(Team::new(&[]).is_err());
    });
}

#[test]
fn dropping_a_team_ends_its_threads() {
    on_a_thread(|| {
        let team = Team::new(&cpus(4)).unwrap();
        let shared = Arc::downgrade(&team.shared);
        drop(team);
        assert!(shared.upgrade().is_none());
    });
}

#[test]
fn a_part_is_open_when_what_follows_its_last_task_is_done() {
    const TASKS: usize = 7;
    const PARTS: usize = 5;
    on_a_thread(|| {
        let team = Team::new(&cpus(3)).unwrap();
        for _ in 0..200 {
            let counts = || [const { AtomicUsize::new(0) }; PARTS];
            let (done, seen) = (counts(), counts());
            let parts = team.parts(PARTS, TASKS);
            let (tasks, all) = (Chunks::new(TASKS * PARTS, 1), Chunks::new(PARTS, 1));
            team.run(|_| {
                while let Some(task) = tasks.claim() {
                    let part = task.start / TASKS;
                    done[part].fetch_add(1, Ordering::Relaxed);
                    if parts.finish_task(part) {
                        seen[part].store(done[part].load(Ordering::Relaxed), Ordering::Relaxed);
                        parts.open(part);
                    }
                }
                while let Some(part) = all.claim() {
                    parts.wait(part.start);
                    assert_eq!(seen[part.start].load(Ordering::Relaxed), TASKS);
                }
            });
        }
    });
}
