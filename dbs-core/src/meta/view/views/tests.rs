use super::*;
use std::collections::HashMap;

impl Views {
    fn counted(&self) -> (usize, usize) {
        let pieces = || self.views.values().flat_map(|view| view.pieces.values());
        (pieces().count(), pieces().map(|piece| piece.bytes()).sum())
    }
}

fn layers(rng: &mut fastrand::Rng) -> Layers {
    let most = if rng.bool() { 2 } else { 6 };
    Layers { entries: (0..rng.u32(..most)).map(|_| rng.u32(..9)).collect(), ..Layers::default() }
}

/// Beside a map: what is said is what was remembered last, or nothing; and not more is kept than may be.
#[test]
fn what_is_remembered_is_right_and_bounded() {
    for capacity in [0, 3 * size_of::<Piece>() as u64 + 100, 20 << 10, 8 << 20] {
        let mut rng = fastrand::Rng::with_seed(capacity);
        let mut views = Views::default();
        views.set_capacity(capacity);
        let mut model: HashMap<(u32, u32), (u64, Layers)> = HashMap::new();
        let mut version = 0;
        for _ in 0..40_000 {
            let (owner, logical) = (rng.u32(..4), rng.u32(..4000));
            match rng.u8(..40) {
                0 => {
                    views.remove(owner);
                    model.retain(|(of, _), _| *of != owner);
                }
                1 => {
                    let to = (owner + 1) % 4;
                    views.hand_over(owner, to);
                    let had = model.keys().any(|(of, _)| *of == owner);
                    model.retain(|(of, _), _| *of != to || !had);
                    let moved = model.extract_if(|(of, _), _| *of == owner);
                    let moved: Vec<_> = moved.map(|((_, at), kept)| ((to, at), kept)).collect();
                    model.extend(moved);
                }
                2 => {
                    let extents = logical..logical + rng.u32(..2000);
                    model.retain(|(of, at), _| *of != owner || !extents.contains(at));
                    views.forget(owner, &extents);
                }
                3 => {
                    let extents = logical..logical + rng.u32(..2000);
                    model.retain(|(_, at), _| !extents.contains(at));
                    views.forget_everywhere(&extents);
                }
                4 if rng.u8(..30) == 0 => version += 1,
                _ => {
                    let known = views.get(owner).map_or(UNKNOWN, |v| v.cell(logical, version));
                    if known == UNKNOWN {
                        let layers = layers(&mut rng);
                        views.remember(owner, logical, version, layers.clone());
                        model.insert((owner, logical), (version, layers));
                    }
                    // What was just looked up is there, however little memory there is.
                    let view = views.get(owner).expect("it has a view");
                    let (cell, mixed) = view.look(logical, version);
                    let (of, layers) = &model[&(owner, logical)];
                    assert_eq!(*of, version);
                    match layers.entries.as_slice() {
                        [] => assert_eq!(cell, NOTHING),
                        [single] => assert_eq!(cell, single + SINGLE),
                        several => {
                            assert_eq!(mixed[(cell & !MIXED) as usize].entries, several);
                        }
                    }
                }
            }
            let (pieces, bytes) = views.counted();
            assert_eq!((views.pieces, views.bytes), (pieces, bytes));
            assert!(bytes as u64 <= capacity || pieces == 1, "{bytes} of {capacity}");
            // At most 8 pieces of each of 4 views are there at once.
            assert!(views.order.len() <= 2 * 32 + 65);
        }
        assert_eq!(views.info().forgotten > 0, capacity < 8 << 20, "pieces went");
    }
}
