use std::sync::atomic::AtomicU32;

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
                let barrier = team.barrier();
                team.run(|member| {
                    assert!(member != culprit, "member {member} fails");
                    barrier.wait();
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
fn a_barrier_separates_phases() {
    on_a_thread(|| {
        for members in [1, 2, 4] {
            let team = Team::new(&cpus(members)).unwrap();
            let barrier = team.barrier();
            let counter = AtomicUsize::new(0);
            team.run(|_| {
                for phase in 1..=200 {
                    counter.fetch_add(1, Ordering::Relaxed);
                    barrier.wait();
                    assert_eq!(counter.load(Ordering::Relaxed), phase * members);
                    barrier.wait();
                }
            });
        }
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
