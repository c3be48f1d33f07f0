//! The inspector: where every layer runs, why, what moves, and how long it was expected to take and took.
//!
//! - It runs nothing and decides nothing: what-if questions go to the compiler as a subprocess.
//! - `scene` joins plan and trace into plain data; everything that draws reads only that.

pub mod compare;
pub mod compare_panel;
pub mod details_panel;
pub mod document;
pub mod files;
pub mod help;
pub mod keys;
pub mod memory_panel;
pub mod perfetto;
pub mod picture;
pub mod placement_panel;
pub mod quantity;
pub mod raster;
pub mod recent;
pub mod scene;
pub mod search;
pub mod step_panel;
pub mod svg;
pub mod text;
pub mod theme;
pub mod timeline_panel;
pub mod view;
mod viewer;
pub mod what_if;

pub use viewer::Viewer;
