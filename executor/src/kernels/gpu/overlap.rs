//! Launches of a captured run that begin while those before them end: CUDA's *programmatic dependent launch*.
//!
//! - A kernel that [`follow()`]s waits until the launch before is over and what that wrote can be seen; only then may
//!   the next launch begin. So two run at the same time at most. Before it waits, a kernel may load weights, and read
//!   what was written two launches ago or earlier: what a run was given comes by launches that do not follow.
//! - That no compiler moves other loads before the wait rests on what NVIDIA says of the instruction: CubeCL's arguments
//!   are `__restrict__`, for which the language alone would allow it. In the 126 kernels that followed in runs of every
//!   format on an H200 (2026-11-29) nothing was loaded before but weights, factors of norms, and what says where tokens
//!   and caches are. The other way round loads are moved behind it, unless a barrier lies between.
//! - CubeCL has every launch wait for the one before as a whole. Its captured graph is still the driver's while a run is
//!   captured (see [`super::stream`]); edges between kernels that follow are replaced there by edges that let the second
//!   begin early.
//! - Other kernels, such as those that wait for letters, keep whole edges to both sides.
//! - Cubes that begin early find their places as others leave them: see [`super::spread`].
//! - Which kernels follow was measured: see benches/RESULTS.md. One row in 12 bits with its kernel is slower so.

#![expect(unsafe_code, reason = "a graph that is being captured is changed through the driver")]

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr;

use anyhow::{Context as _, Result};
use cubecl::prelude::*;
use cubecl::server::ServerError;
use cudarc::driver::sys::{self, CUgraph, CUgraphEdgeData, CUgraphNode, CUstream};

use super::device::{Gpu, is_hopper_or_newer};
use super::stream::streams;

/// The kernels that follow, and the only ones of their names in captured runs.
const FOLLOWERS: [&str; 9] = [
    CASTS,
    "decode",
    "gather",
    "list",
    "merge",
    "multiply_blocks",
    CLUSTERS,
    "multiply_portions",
    "multiply_rows",
];
/// The kernel that casts rows: it follows where it has few of them.
const CASTS: &str = "cast_operands";
/// The kernel whose cubes may come in clusters.
const CLUSTERS: &str = "multiply_groups";
/// The first driver that knows edges of more than one kind: that of CUDA 12.3.
const FIRST_DRIVER: i32 = 12_030;

/// The second launch begins when the first is over.
const WHOLE: CUgraphEdgeData =
    CUgraphEdgeData { from_port: 0, to_port: 0, type_: 0, reserved: [0; 5] };

/// The second launch begins when all cubes of the first let it, by `CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC` and
/// `CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC`.
const EARLY: CUgraphEdgeData =
    CUgraphEdgeData { from_port: 1, to_port: 0, type_: 1, reserved: [0; 5] };

/// Waits for the launch before, and lets the next begin. Some unit of every cube does before any of the cube reads what
/// the launch before may have written, or writes anything: others meet it at a barrier.
#[cube]
pub(super) fn follow() {
    let properties = comptime::device_properties();
    if comptime!(is_hopper_or_newer(&properties)) {
        gpu_asm!("griddepcontrol.wait; griddepcontrol.launch_dependents;");
    }
}

impl Gpu {
    /// Lets kernels of the run that is being captured begin while those before them end. Says how many may; none where
    /// the driver refuses.
    ///
    /// # Errors
    /// When what is captured lacks an edge now.
    pub(super) fn overlap_launches(&self) -> Result<usize, ServerError> {
        if !self.overlaps() {
            return Ok(0);
        }
        self.overlap_captured().unwrap_or_else(|error| {
            tracing::debug!("launches of a captured run do not overlap: {error:#}");
            Ok(0)
        })
    }

    /// The same where launches can; the outer error is why nothing was changed.
    fn overlap_captured(&self) -> Result<Result<usize, ServerError>> {
        // All launches are the driver's before its graph is looked at.
        self.flush()?;
        self.ask_server(|server| {
            for stream in streams(server)? {
                // SAFETY: a server's streams live as long as it does, and it is not used meanwhile. A graph is that of
                // a capture that goes on, and the edges are its own.
                unsafe {
                    if let Some(graph) = captured_graph(stream.raw())? {
                        return Ok(overlap(graph, &followed_edges(graph, self.processors())?));
                    }
                }
            }
            Ok(Ok(0))
        })
    }

    /// Whether launches can begin early.
    pub(super) fn overlaps(&self) -> bool {
        self.is_cuda()
            && is_hopper_or_newer(self.client.properties())
            && driver().is_ok_and(|version| version >= FIRST_DRIVER)
    }
}

/// The driver's version, 1000 for each major one and 10 for each minor one.
fn driver() -> Result<i32> {
    let mut version = 0;
    // SAFETY: the number is there to be written.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

fn check(call: &str, status: sys::CUresult) -> Result<()> {
    status.result().with_context(|| format!("{call} failed"))
}

/// The graph to which a stream's launches are added, if they are captured.
///
/// # Safety
/// The stream exists.
unsafe fn captured_graph(stream: CUstream) -> Result<Option<CUgraph>> {
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut graph = ptr::null_mut();
    // SAFETY: the stream exists; what is not asked for may be null.
    let told = unsafe {
        sys::cuStreamGetCaptureInfo_v3(
            stream,
            &raw mut status,
            ptr::null_mut(),
            &raw mut graph,
            ptr::null_mut(),
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    check("cuStreamGetCaptureInfo", told)?;
    let is_captured = status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE;
    Ok(is_captured.then_some(graph))
}

/// Lets the second kernel of each edge begin early, and says of how many that could be done.
///
/// # Errors
/// When the driver does not take back an edge that was removed.
///
/// # Safety
/// The graph exists, no other thread uses it, and the edges are whole ones of it.
unsafe fn overlap(
    graph: CUgraph,
    edges: &[(CUgraphNode, CUgraphNode)],
) -> Result<usize, ServerError> {
    let (whole, early) = (ptr::from_ref(&WHOLE), ptr::from_ref(&EARLY));
    for (count, (from, to)) in edges.iter().enumerate() {
        // SAFETY: the nodes are the graph's, and so is the edge between them until it is removed.
        unsafe {
            let removed = sys::cuGraphRemoveDependencies_v2(graph, from, to, whole, 1);
            if removed.result().is_err() {
                return Ok(count);
            }
            let added = sys::cuGraphAddDependencies_v2(graph, from, to, early, 1);
            if added.result().is_err() {
                let added = sys::cuGraphAddDependencies_v2(graph, from, to, whole, 1);
                let lost = |error| {
                    ServerError::graph_state(format!("a captured run lost an edge: {error}"))
                };
                return added.result().map(|()| count).map_err(lost);
            }
        }
    }
    Ok(edges.len())
}

/// A graph's edges between kernels that follow on a GPU of so many processors, as far as they are whole.
///
/// # Safety
/// The graph exists, and no other thread uses it.
unsafe fn followed_edges(
    graph: CUgraph,
    processors: u32,
) -> Result<Vec<(CUgraphNode, CUgraphNode)>> {
    let mut followed = Vec::new();
    // SAFETY: the graph exists, and so do its nodes.
    unsafe {
        for (from, to) in whole_edges(graph)? {
            if let (Some(first), Some(second)) = (follower(from)?, follower(to)?)
                && may_overlap(first, second, processors)
            {
                followed.push((from, to));
            }
        }
    }
    Ok(followed)
}

/// A graph's edges that have a launch wait for another as a whole.
///
/// # Safety
/// The graph exists, and no other thread uses it.
unsafe fn whole_edges(graph: CUgraph) -> Result<Vec<(CUgraphNode, CUgraphNode)>> {
    let (mut from, mut to, mut data) = (Vec::new(), Vec::new(), Vec::new());
    let mut count = 0;
    // SAFETY: the graph exists; without lists the driver counts.
    let counted = unsafe {
        let (none, no_data) = (ptr::null_mut(), ptr::null_mut());
        sys::cuGraphGetEdges_v2(graph, none, none, no_data, &raw mut count)
    };
    check("cuGraphGetEdges", counted)?;
    from.resize(count, ptr::null_mut());
    to.resize(count, ptr::null_mut());
    data.resize(count, WHOLE);
    // SAFETY: the lists have room for as many edges as the driver is told.
    let listed = unsafe {
        let (from, to) = (from.as_mut_ptr(), to.as_mut_ptr());
        sys::cuGraphGetEdges_v2(graph, from, to, data.as_mut_ptr(), &raw mut count)
    };
    check("cuGraphGetEdges", listed)?;
    let edges = from.into_iter().zip(to).zip(data).take(count);
    Ok(edges.filter(|&(_, data)| data == WHOLE).map(|(edge, _)| edge).collect())
}

/// A launch of a kernel that follows.
#[derive(Clone, Copy, Debug)]
struct Follower {
    /// One of [`FOLLOWERS`].
    name: &'static str,
    /// All of the launch.
    cubes: u32,
}

/// What a node of a graph launches, if that is one of [`FOLLOWERS`].
///
/// # Safety
/// The node exists.
unsafe fn follower(node: CUgraphNode) -> Result<Option<Follower>> {
    let mut kind = sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
    // SAFETY: the node exists.
    check("cuGraphNodeGetType", unsafe { sys::cuGraphNodeGetType(node, &raw mut kind) })?;
    if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL {
        return Ok(None);
    }
    let mut launch = MaybeUninit::<sys::CUDA_KERNEL_NODE_PARAMS>::zeroed();
    // SAFETY: the node is a kernel's, whose launch is written.
    let told = unsafe { sys::cuGraphKernelNodeGetParams_v2(node, launch.as_mut_ptr()) };
    check("cuGraphKernelNodeGetParams", told)?;
    // SAFETY: numbers and pointers, of which zeros are some.
    let launch = unsafe { launch.assume_init() };
    let function = launch.func;
    if function.is_null() {
        return Ok(None);
    }
    let mut name = ptr::null();
    // SAFETY: the function is that of a launch.
    check("cuFuncGetName", unsafe { sys::cuFuncGetName(&raw mut name, function) })?;
    // SAFETY: the driver's names end with a zero and live as long as their functions.
    let name = unsafe { CStr::from_ptr(name) };
    let name = name.to_str().ok().and_then(follower_name);
    let cubes = launch.gridDimX * launch.gridDimY * launch.gridDimZ;
    Ok(name.map(|name| Follower { name, cubes }))
}

/// Which one of those that follow a compiled kernel is: its name is that of its function, those of its types and sizes,
/// and a number.
fn follower_name(name: &str) -> Option<&'static str> {
    let (name, _) = name.rsplit_once('_')?;
    FOLLOWERS.into_iter().find(|follower| {
        name.strip_prefix(follower).is_some_and(|types| {
            // Types and sizes of kernels are named by one letter.
            types.is_empty() || types.starts_with('_') && types.get(2..3) == Some("_")
        })
    })
}

/// Whether the second of two launches may begin before the first is over.
///
/// The cubes of a cluster find their places together or not at all. Where those of another launch end one by one, the
/// first clusters take what is free, and the last find none until those are over: on an H200 32 clusters of seven, a
/// down behind its gate and up, took 27.9 µs then with 64 rows instead of some 16. Casts of few rows leave most
/// processors free; cubes that have one each when all are free may not have if they begin early.
fn may_overlap(first: Follower, second: Follower, processors: u32) -> bool {
    let follows = |launch: Follower| launch.name != CASTS || launch.cubes <= processors / 2;
    let finds_places = second.name != CLUSTERS || first.name == CASTS && second.cubes > processors;
    follows(first) && follows(second) && finds_places
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::kernels::gpu::rows::Gather;
    use crate::kernels::gpu::testing::gpu;

    #[test]
    fn kernels_are_known_by_their_names() {
        for name in [
            "merge_0ab1",
            "merge_n_4_0ab1",
            "gather_f_f32_n_4_77aa",
            "multiply_rows_n_4_1",
            "cast_operands_x_f32_77aa",
            "multiply_groups_f_bf16_0ab1",
            "decode_f_f32_1",
        ] {
            assert!(follower_name(name).is_some(), "{name}");
        }
        for name in ["list_tiles_0ab1", "gather_words_0ab1", "multiply_tiles_0ab1", "merge"] {
            assert_eq!(follower_name(name), None, "{name}");
        }
    }

    #[test]
    fn clusters_begin_early_where_they_find_places() {
        let may = |first, second| may_overlap(first, second, 132);
        let of = |name, cubes| Follower { name, cubes };
        let (clusters, attention) = (of(CLUSTERS, 224), of("decode", 192));
        assert!(may(of(CASTS, 64), clusters) && may(clusters, of(CASTS, 64)));
        assert!(!may(of(CASTS, 128), clusters) && !may(clusters, of(CASTS, 128)));
        assert!(!may(of(CASTS, 64), of(CLUSTERS, 96)));
        assert!(!may(clusters, clusters) && !may(attention, clusters));
        assert!(may(clusters, attention) && may(attention, attention));
    }

    /// Calls `visit` with the text of every file of kernels.
    fn visit_kernels(folder: &Path, visit: &mut impl FnMut(&Path, &str)) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit_kernels(&path, visit);
            } else {
                visit(&path, &fs::read_to_string(&path).unwrap());
            }
        }
    }

    /// A kernel that is let begin early and does not wait would read what is not written yet.
    #[test]
    fn kernels_that_begin_early_wait() {
        let mut seen = Vec::new();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels/gpu");
        visit_kernels(&folder, &mut |path, text| {
            // This file has no kernels, but names what they begin with.
            let kernels =
                text.split("#[cube(launch").skip(1).filter(|_| !path.ends_with("overlap.rs"));
            for kernel in kernels {
                let name = kernel.split("fn ").nth(1).unwrap().split(['(', '<']).next().unwrap();
                if follower_name(&format!("{name}_0")).is_some() {
                    // To the next kernel, with what stands between.
                    assert!(kernel.contains("    follow();"), "{name} of {}", path.display());
                    seen.push(String::from(name));
                }
            }
        });
        seen.sort();
        seen.dedup();
        assert_eq!(seen, FOLLOWERS, "all of them are there");
    }

    #[test]
    fn captured_launches_overlap_and_see_each_others_outputs() {
        let Some(gpu) = gpu() else { return };
        if !gpu.overlaps() {
            eprintln!(
                "skipped: only NVIDIA GPUs from Hopper on, with drivers of CUDA 12.3, begin launches early"
            );
            return;
        }
        const COUNT: usize = 1 << 20;
        let spans = [0.0; 5].map(|value| gpu.upload(&vec![value; COUNT]));
        let backwards: Vec<u32> = (0..COUNT as u32).rev().collect();
        let call = Gather {
            rows: &gpu.upload(&backwards),
            offset: 0,
            scale: 2.0,
            base: None,
            count: COUNT,
            features: 1,
        };
        let queue = || {
            spans.array_windows().for_each(|[from, to]| gpu.select(from, COUNT, &call, to));
            anyhow::Ok(())
        };
        let (graph, overlapped) = gpu.captured(queue);
        assert_eq!(overlapped, spans.len() - 2, "CubeCL tells of its streams in another way");
        for run in 1..=20_u16 {
            gpu.write(&spans[0], bytemuck::cast_slice(&vec![f32::from(run); COUNT])).unwrap();
            // SAFETY: the spans live until the end.
            unsafe { graph.replay() }.unwrap();
            assert_eq!(gpu.download::<f32>(&spans[4], COUNT), vec![16.0 * f32::from(run); COUNT]);
        }
    }
}
