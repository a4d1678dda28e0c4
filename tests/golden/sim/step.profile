interlace-profile 1
fingerprint "some machine"
op "aten.mm(f32[2048,1024],f32[1024,1024])->f32[2048,1024]" us 45000 bytes 8388608 transient 0 measured
